"""Alignment by cross-attention: which heads align, and monotone alignments by chosen heads."""

from headwise.roles.cross_attention._align import Alignment, align, aligned
from headwise.roles.cross_attention._aligned_batch import AlignedBatch
from headwise.roles.cross_attention._find import find_alignment_heads
from headwise.roles.cross_attention._table import AlignmentHeads
from headwise.roles.cross_attention._word_alignment import alignment

__all__ = [
    "AlignedBatch",
    "Alignment",
    "AlignmentHeads",
    "align",
    "aligned",
    "alignment",
    "find_alignment_heads",
]
