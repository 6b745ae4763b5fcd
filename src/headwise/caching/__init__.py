"""Plans for caches: which tokens each kv head keeps, and the scores that decide it."""

from headwise.caching._cache_plan import cache_plan as cache_plan
from headwise.caching._cache_plan import retrieval_batches as retrieval_batches
from headwise.caching._compare import compare_caches as compare_caches
from headwise.caching._duo_attention import load_duo_attention as load_duo_attention
from headwise.caching._duo_attention import save_duo_attention as save_duo_attention
from headwise.caching._plan import CachePlan as CachePlan
from headwise.caching._plan import LayerCachePlan as LayerCachePlan
