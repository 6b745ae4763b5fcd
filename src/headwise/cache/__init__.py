"""Caches whose kv heads keep different tokens, and attention to what is left in them."""

from headwise.cache._attend import streaming_heads
from headwise.cache._grouped_keys import CallKeys, GroupedKeys

__all__ = ["CallKeys", "GroupedKeys", "streaming_heads"]
