"""Cutting heads out of the attentions of a model, and adapting the modules around them."""

from headwise.surgery.cutting._cut import cut_heads, fold_into_bias
from headwise.surgery.cutting._torch import TorchCompatibleAttention, replace_torch_layers

__all__ = ["TorchCompatibleAttention", "cut_heads", "fold_into_bias", "replace_torch_layers"]
