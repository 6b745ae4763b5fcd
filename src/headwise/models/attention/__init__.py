"""Hugging Face models on the kernels of this library, by name."""

from headwise.models.attention._register import register_attention, set_attention
from headwise.models.attention._rule_mask import DESCRIPTIONS, NAME, RuleMask

__all__ = ["DESCRIPTIONS", "NAME", "RuleMask", "register_attention", "set_attention"]
