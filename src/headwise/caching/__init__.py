"""Plans for caches: which tokens each kv head keeps, and the scores that decide it."""

from headwise.caching._plan import CachePlan, LayerCachePlan

__all__ = ["CachePlan", "LayerCachePlan"]
