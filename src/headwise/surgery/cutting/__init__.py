"""Cutting heads out of one attention, and what must be seen to around it."""

from headwise.surgery.cutting._cut import Keep, choose, cut, fold_into_bias, kept_indices
from headwise.surgery.cutting._position_biases import bound_to_biases, carry_biases, is_bias_table
from headwise.surgery.cutting._torch import InPlaceOfTorch, keep_heads, put_in_place

__all__ = [
    "InPlaceOfTorch",
    "Keep",
    "bound_to_biases",
    "carry_biases",
    "choose",
    "cut",
    "fold_into_bias",
    "is_bias_table",
    "keep_heads",
    "kept_indices",
    "put_in_place",
]
