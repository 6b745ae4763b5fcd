"""The attention layer, with rotary embeddings, position biases and a key/value cache."""

from headwise.layer._attention import MultiHeadAttention
from headwise.layer._biases import ALiBi, DistanceBias, PositionBias
from headwise.layer._cache import CachedKeys, KVCache
from headwise.layer._core import HeadAttention, LayerOutput
from headwise.layer._positions import RoPE

__all__ = [
    "ALiBi",
    "CachedKeys",
    "DistanceBias",
    "HeadAttention",
    "KVCache",
    "LayerOutput",
    "MultiHeadAttention",
    "PositionBias",
    "RoPE",
]
