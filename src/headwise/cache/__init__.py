"""Caches whose kv heads keep different tokens, and attention to what is left in them."""

from headwise.cache._grouped_keys import GroupedKeys as GroupedKeys
