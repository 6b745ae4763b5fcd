"""Cutting heads out of the attentions of a model, and adapting the modules around them."""

from headwise.surgery.cutting._cut import cut_heads, fold_into_bias

__all__ = ["cut_heads", "fold_into_bias"]
