"""Studies of corpora on several processes or machines: shards that add up to one result."""

from headwise.jobs._corpus import CorpusJob as CorpusJob
from headwise.jobs._corpus import ImportanceRequest as ImportanceRequest
from headwise.jobs._corpus import ModelSource as ModelSource
from headwise.jobs._corpus import corpus as corpus
from headwise.jobs._corpus import merge_corpus as merge_corpus
