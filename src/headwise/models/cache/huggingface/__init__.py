"""Caches of Hugging Face models whose kv heads keep different tokens."""

from headwise.models.cache.huggingface._head_cache import HeadCache
from headwise.models.cache.huggingface._open import open_cache, sliding_windows

__all__ = ["HeadCache", "open_cache", "sliding_windows"]
