"""The definition of attention in NumPy: slow and obvious, the reference for all other paths.

`attention` computes one query at a time in float64, over exactly the keys that it may attend to.
`scaled_dot_product` is the formula as papers print it. The layer is built on that formula, once
as a loop over heads and once as a batched expression. Query head `h` reads kv head `h // G`.
"""

from headwise.reference._attention import AttentionOutput, attention
from headwise.reference._formula import scaled_dot_product
from headwise.reference._layer import (
    MultiHeadAttention,
    multi_head_batched,
    multi_head_loop,
    single_head,
)

__all__ = [
    "AttentionOutput",
    "MultiHeadAttention",
    "attention",
    "multi_head_batched",
    "multi_head_loop",
    "scaled_dot_product",
    "single_head",
]
