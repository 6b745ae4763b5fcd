"""The kernel as an attention implementation of Hugging Face's models."""

from headwise.models.attention.huggingface._implementation import (
    Call,
    attention_forward,
)
from headwise.models.attention.huggingface._masks import attention_mask
from headwise.models.attention.huggingface._rule import keys_read, rule_of

__all__ = ["Call", "attention_forward", "attention_mask", "keys_read", "rule_of"]
