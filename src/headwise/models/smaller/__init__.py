"""Models that heads were cut out of: how they differ, and the forms they are written in."""

from headwise.models.smaller._describe import (
    begin_smaller,
    class_of_smaller,
    describe_smaller,
    differences_of,
    read_smaller,
)
from headwise.models.smaller._differences import Differences
from headwise.models.smaller._fresh import Reader, answer_afresh
from headwise.models.smaller._layer import read_layer, write_layer
from headwise.models.smaller._remote import write_remote
from headwise.models.smaller._shrink import TABLE, OwnHeads, hands_on, resize, set_count
from headwise.models.smaller._stock import as_stock, rebuild

__all__ = [
    "TABLE",
    "Differences",
    "OwnHeads",
    "Reader",
    "answer_afresh",
    "as_stock",
    "begin_smaller",
    "class_of_smaller",
    "describe_smaller",
    "differences_of",
    "hands_on",
    "read_layer",
    "read_smaller",
    "rebuild",
    "resize",
    "set_count",
    "write_layer",
    "write_remote",
]
