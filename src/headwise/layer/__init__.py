"""The attention layer: project, attend, join."""

from headwise.layer._attention import HeadAttention, MultiHeadAttention

__all__ = ["HeadAttention", "MultiHeadAttention"]
