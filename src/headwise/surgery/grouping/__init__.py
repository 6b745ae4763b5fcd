"""Grouped-query attention from multi-head attention: heads that share keys and values."""

from headwise.surgery.grouping._group import group_heads
from headwise.surgery.grouping._layer import GroupedLayer

__all__ = ["GroupedLayer", "group_heads"]
