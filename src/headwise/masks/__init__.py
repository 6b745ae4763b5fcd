"""Which queries may attend to which keys, as a rule that costs nothing until it is used.

True = may attend, everywhere. Masks combine with `&`, `|` and `~`. Queries stand at the end
of the keys: query `i` of `T` is at key position `i + S - T`, so a causal mask with `T < S` is
aligned bottom-right and the last query sees the last key.
"""

from headwise.masks._given import (
    Dense,
    as_mask,
    from_additive,
    from_binary,
    from_blocked,
    from_flex,
    split_additive,
)
from headwise.masks._look import (
    can_look,
    in_func_gradient,
    is_recorded,
    is_there,
    is_trained,
    is_transformed,
    is_wrapped,
    known,
    mapped_with,
    settled,
)
from headwise.masks._mask import Mask
from headwise.masks._parts import Parts
from headwise.masks._rules import Window, causal, documents, padding, window
from headwise.masks._tile import Span, Tile, cut

__all__ = [
    "Dense",
    "Mask",
    "Parts",
    "Span",
    "Tile",
    "Window",
    "as_mask",
    "can_look",
    "causal",
    "cut",
    "documents",
    "from_additive",
    "from_binary",
    "from_blocked",
    "from_flex",
    "in_func_gradient",
    "is_recorded",
    "is_there",
    "is_trained",
    "is_transformed",
    "is_wrapped",
    "known",
    "mapped_with",
    "padding",
    "settled",
    "split_additive",
    "window",
]
