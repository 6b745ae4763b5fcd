"""Models that heads were cut out of: how they differ, and the forms they are written in."""

from headwise.models.checkpoints._differences import Differences
from headwise.models.checkpoints._fresh_process import SENTENCES, Reader, answer_in_fresh_process
from headwise.models.checkpoints._layer_folder import read_layer, write_layer
from headwise.models.checkpoints._manifest import (
    apply_changes,
    changed_class,
    describe_changes,
    differences_of,
    read_changes,
)
from headwise.models.checkpoints._original import (
    ORIGINAL,
    compose_heads,
    original_heads,
    originals_of,
    read_original,
    set_original_heads,
)
from headwise.models.checkpoints._remote_code import write_remote
from headwise.models.checkpoints._resize import TABLE, OwnHeads, hands_on, resize, set_count
from headwise.models.checkpoints._stock import as_stock, rebuild

__all__ = [
    "ORIGINAL",
    "SENTENCES",
    "TABLE",
    "Differences",
    "OwnHeads",
    "Reader",
    "answer_in_fresh_process",
    "apply_changes",
    "as_stock",
    "changed_class",
    "compose_heads",
    "describe_changes",
    "differences_of",
    "hands_on",
    "original_heads",
    "originals_of",
    "read_changes",
    "read_layer",
    "read_original",
    "rebuild",
    "resize",
    "set_count",
    "set_original_heads",
    "write_layer",
    "write_remote",
]
