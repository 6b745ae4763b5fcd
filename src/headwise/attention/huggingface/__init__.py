"""The kernel as an attention implementation of Hugging Face's models."""

from headwise.attention.huggingface._call import Call as Call
from headwise.attention.huggingface._call import attention_forward as attention_forward
from headwise.attention.huggingface._masks import attention_mask as attention_mask
