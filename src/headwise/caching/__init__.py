"""Plans for caches: which tokens each kv head keeps, and the scores that decide it."""

from headwise.caching._cache_plan import cache_plan, cache_scores
from headwise.caching._compare import compare_caches
from headwise.caching._duo_attention import load_duo_attention, save_duo_attention
from headwise.caching._plan import CachePlan, LayerCachePlan
from headwise.caching._retrieval import retrieval_batches
from headwise.caching._scores import CacheScores

__all__ = [
    "CachePlan",
    "CacheScores",
    "LayerCachePlan",
    "cache_plan",
    "cache_scores",
    "compare_caches",
    "load_duo_attention",
    "retrieval_batches",
    "save_duo_attention",
]
