"""Plans for caches: which tokens each kv head keeps, and the scores that decide it."""

from headwise.caching._cache_plan import cache_plan, cache_scores
from headwise.caching._plan import CachePlan, LayerCachePlan
from headwise.caching._scores import CacheScores

__all__ = ["CachePlan", "CacheScores", "LayerCachePlan", "cache_plan", "cache_scores"]
