"""Other models on the kernels of this library: by name, or in place of torch's function."""

from headwise.attention._fast_attention import fast_attention
from headwise.attention._register import register_attention, set_attention
from headwise.attention._rule_mask import DESCRIPTIONS, NAME, RuleMask

__all__ = [
    "DESCRIPTIONS",
    "NAME",
    "RuleMask",
    "fast_attention",
    "register_attention",
    "set_attention",
]
