"""Other people's models on the kernels of this library, by name or while a block runs."""

from headwise.models.attention._register import register_attention, set_attention
from headwise.models.attention._rule_mask import RuleMask

__all__ = ["RuleMask", "register_attention", "set_attention"]
