"""Studies of corpora on several processes or machines: shards that add up to one result."""

from headwise.jobs._corpus import CorpusJob, ImportanceRequest, ModelSource, corpus, merge_corpus

__all__ = ["CorpusJob", "ImportanceRequest", "ModelSource", "corpus", "merge_corpus"]
