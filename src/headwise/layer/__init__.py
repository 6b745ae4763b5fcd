"""The attention layer, with rotary embeddings, position biases and a key/value cache."""

from headwise.layer._attention import MultiHeadAttention
from headwise.layer._biases import ALiBi, DistanceBias, PositionBias, T5Bias
from headwise.layer._cache import CachedKeys, KVCache
from headwise.layer._core import HeadAttention, LayerOutput
from headwise.layer._positions import LinearScaling, Llama3Scaling, NTKScaling, RoPE, Scaling, YaRN

__all__ = [
    "ALiBi",
    "CachedKeys",
    "DistanceBias",
    "HeadAttention",
    "KVCache",
    "LayerOutput",
    "LinearScaling",
    "Llama3Scaling",
    "MultiHeadAttention",
    "NTKScaling",
    "PositionBias",
    "RoPE",
    "Scaling",
    "T5Bias",
    "YaRN",
]
