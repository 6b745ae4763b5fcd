"""The kernel as an attention implementation of Hugging Face's models."""

from headwise.attention.huggingface._call import Call, attention_forward
from headwise.attention.huggingface._masks import attention_mask

__all__ = ["Call", "attention_forward", "attention_mask"]
