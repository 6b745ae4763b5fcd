"""Other models on the kernels of this library: by name, or in place of torch's function."""

from headwise.attention._fast_attention import fast_attention as fast_attention
from headwise.attention._register import register_attention as register_attention
from headwise.attention._register import set_attention as set_attention
from headwise.attention._rule_mask import DESCRIPTIONS as DESCRIPTIONS
from headwise.attention._rule_mask import NAME as NAME
from headwise.attention._rule_mask import RuleMask as RuleMask
