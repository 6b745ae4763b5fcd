"""Models that heads were cut out of: how they differ, and the forms they are written in."""

from headwise.models.smaller._describe import (
    begin_smaller,
    class_of_smaller,
    describe_smaller,
    differences_of,
    read_smaller,
)
from headwise.models.smaller._differences import Differences
from headwise.models.smaller._fresh import SENTENCES, Reader, answer_afresh
from headwise.models.smaller._layer import read_layer, write_layer
from headwise.models.smaller._original import (
    ORIGINAL,
    compose_heads,
    original_heads,
    originals_of,
    read_original,
    set_original_heads,
)
from headwise.models.smaller._remote import write_remote
from headwise.models.smaller._shrink import TABLE, OwnHeads, hands_on, resize, set_count
from headwise.models.smaller._stock import as_stock, rebuild

__all__ = [
    "ORIGINAL",
    "SENTENCES",
    "TABLE",
    "Differences",
    "OwnHeads",
    "Reader",
    "answer_afresh",
    "as_stock",
    "begin_smaller",
    "class_of_smaller",
    "compose_heads",
    "describe_smaller",
    "differences_of",
    "hands_on",
    "original_heads",
    "originals_of",
    "read_layer",
    "read_original",
    "read_smaller",
    "rebuild",
    "resize",
    "set_count",
    "set_original_heads",
    "write_layer",
    "write_remote",
]
