"""The definition of attention in NumPy: slow and obvious, the reference for all other paths.

`attention` computes one query at a time in float64, over exactly the keys that it may attend to.
`scaled_dot_product` is the formula as papers print it. The layer is built on that formula, once
as a loop over heads and once as a batched expression. Query head `h` reads kv head `h // G`.
"""

from headwise.reference._attention import AttentionOutput as AttentionOutput
from headwise.reference._attention import attention as attention
from headwise.reference._formula import scaled_dot_product as scaled_dot_product
from headwise.reference._layer import MultiHeadAttention as MultiHeadAttention
from headwise.reference._layer import multi_head_batched as multi_head_batched
from headwise.reference._layer import multi_head_loop as multi_head_loop
from headwise.reference._layer import single_head as single_head
