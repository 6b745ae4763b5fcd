"""Alignment by cross-attention: which heads align, and monotone alignments by chosen heads."""

from headwise.roles.cross_attention._align import Alignment, align, aligned
from headwise.roles.cross_attention._find import find_alignment_heads
from headwise.roles.cross_attention._known import AlignedBatch
from headwise.roles.cross_attention._linked import evaluate_pairs, linked_pairs
from headwise.roles.cross_attention._table import AlignmentHeads
from headwise.roles.cross_attention._weights import CrossAttention, cross_attention
from headwise.roles.cross_attention._word_alignment import alignment

__all__ = [
    "AlignedBatch",
    "Alignment",
    "AlignmentHeads",
    "CrossAttention",
    "align",
    "aligned",
    "alignment",
    "cross_attention",
    "evaluate_pairs",
    "find_alignment_heads",
    "linked_pairs",
]
