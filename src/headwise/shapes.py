"""The names of dimensions: each letter has one meaning in all signatures and comments.

B    batch                     T    queries             S   keys (cached ones included)
H    query heads               Hkv  key/value heads     G   query heads per kv head, H // Hkv
D    width of a query or key   Dv   width of a value    L   layers
R    queries in one block      N    heads in a table    C   classes of tokens

Layout is `B H T D`. Query head `h` reads kv head `h // G`.
Logits come before the softmax, weights after it; heads are the per-head outputs before
`W_O`, out comes after. A boolean mask says True where a query may attend.
"""

from numbers import Integral


def is_size(value: object) -> bool:
    """Whether a value is a positive integer of Python or NumPy; True is not one."""
    return value is not True and isinstance(value, Integral) and int(value) > 0
