"""The attention layer, with rotary embeddings, position biases and a key/value cache."""

from headwise.layer._attention import MultiHeadAttention as MultiHeadAttention
from headwise.layer._core import HeadAttention as HeadAttention
from headwise.layer._core import KVCache as KVCache
from headwise.layer._core import LayerOutput as LayerOutput
from headwise.layer._positions import ALiBi as ALiBi
from headwise.layer._positions import RoPE as RoPE
