"""Which queries may attend to which keys, as a rule that costs nothing until it is used.

True = may attend, everywhere. Masks combine with `&`, `|` and `~`. Queries stand at the end
of the keys: query `i` of `T` is at key position `i + S - T`, so a causal mask with `T < S` is
aligned bottom-right and the last query sees the last key.
"""

from headwise.masks._mask import Mask
from headwise.masks._rules import Window, causal, documents, padding, window
from headwise.masks._tensors import as_mask, from_additive, from_binary, from_blocked, from_flex

__all__ = [
    "Mask",
    "Window",
    "as_mask",
    "causal",
    "documents",
    "from_additive",
    "from_binary",
    "from_blocked",
    "from_flex",
    "padding",
    "window",
]
