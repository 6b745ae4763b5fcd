"""Heads that share keys and values: which come together, what they share, and what takes it on."""

from headwise.surgery.grouping._group import Method, group_heads
from headwise.surgery.grouping._layer import GroupedLayer

__all__ = ["GroupedLayer", "Method", "group_heads"]
