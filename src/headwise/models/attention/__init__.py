"""Other people's models on the kernels of this library, by name or while a block runs."""

from headwise.models.attention._fast import fast_attention
from headwise.models.attention._register import NAME, register_attention, set_attention
from headwise.models.attention._rule_mask import RuleMask

__all__ = ["NAME", "RuleMask", "fast_attention", "register_attention", "set_attention"]
