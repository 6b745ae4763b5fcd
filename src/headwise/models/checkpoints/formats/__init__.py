"""The formats that changed models are written in, and what each needs to be opened again."""

from headwise.models.checkpoints.formats._changes import (
    Differences,
    apply_changes,
    changed_class,
    differences_of,
    read_changes,
)
from headwise.models.checkpoints.formats._formats import Format, as_format, write_format
from headwise.models.checkpoints.formats._layer_folder import read_layer, write_layer
from headwise.models.checkpoints.formats._resize import (
    BiasHeads,
    is_bias_table,
    returns_biases,
    set_count,
    update_sizes,
)

__all__ = [
    "BiasHeads",
    "Differences",
    "Format",
    "apply_changes",
    "as_format",
    "changed_class",
    "differences_of",
    "is_bias_table",
    "read_changes",
    "read_layer",
    "returns_biases",
    "set_count",
    "update_sizes",
    "write_format",
    "write_layer",
]
