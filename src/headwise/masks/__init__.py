"""Which queries may attend to which keys, as a rule that costs nothing until it is used.

True = may attend, everywhere. Masks combine with `&`, `|` and `~`. Queries stand at the end
of the keys: query `i` of `T` is at key position `i + S - T`, so a causal mask with `T < S` is
aligned bottom-right and the last query sees the last key.
"""

from headwise.masks._mask import Mask as Mask
from headwise.masks._rules import Window as Window
from headwise.masks._rules import causal as causal
from headwise.masks._rules import documents as documents
from headwise.masks._rules import padding as padding
from headwise.masks._rules import window as window
from headwise.masks._tensors import as_mask as as_mask
from headwise.masks._tensors import from_additive as from_additive
from headwise.masks._tensors import from_binary as from_binary
from headwise.masks._tensors import from_blocked as from_blocked
from headwise.masks._tensors import from_flex as from_flex
