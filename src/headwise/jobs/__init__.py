"""Studies of corpora on several processes or machines: shards that add up to one result."""

from headwise.jobs._corpus import corpus, merge_corpus
from headwise.jobs._job import CorpusJob
from headwise.jobs._model_source import ModelSource
from headwise.jobs._roles import RolesRequest
from headwise.jobs._scoring import ImportanceRequest

__all__ = [
    "CorpusJob",
    "ImportanceRequest",
    "ModelSource",
    "RolesRequest",
    "corpus",
    "merge_corpus",
]
