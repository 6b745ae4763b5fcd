"""Cutting heads out of one attention, and what must be seen to around it."""

from headwise.surgery.cutting._bound import carry_biases
from headwise.surgery.cutting._cut import Keep, choose, cut, fold_into_bias, kept_indices
from headwise.surgery.cutting._torch import InPlaceOfTorch, keep_heads, put_in_place

__all__ = [
    "InPlaceOfTorch",
    "Keep",
    "carry_biases",
    "choose",
    "cut",
    "fold_into_bias",
    "keep_heads",
    "kept_indices",
    "put_in_place",
]
