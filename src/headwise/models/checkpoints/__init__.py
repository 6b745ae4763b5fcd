"""Checkpoints of models with changed heads: every format, and the check in a fresh process."""

from headwise.models.checkpoints._formats import as_format
from headwise.models.checkpoints._fresh_process import SENTENCES
from headwise.models.checkpoints._manifest import (
    CHANGED,
    LAYER,
    apply_changes,
    apply_checked,
    changed_class,
    differences_between,
    differences_of,
    read_layer,
    read_manifest,
    write_layer,
)
from headwise.models.checkpoints._original_heads import (
    ORIGINAL,
    compose_heads,
    originals_of,
    read_original,
    set_original_heads,
)
from headwise.models.checkpoints._resize import (
    BiasHeads,
    is_bias_table,
    returns_biases,
    set_count,
    update_sizes,
)
from headwise.models.checkpoints._save import save
from headwise.models.checkpoints._source_files import TOKENIZER_FILES, source_files
from headwise.models.checkpoints._torch_layer import (
    TorchCompatibleAttention,
    replace_torch_layers,
    update_heads,
)

__all__ = [
    "CHANGED",
    "LAYER",
    "ORIGINAL",
    "SENTENCES",
    "TOKENIZER_FILES",
    "BiasHeads",
    "TorchCompatibleAttention",
    "apply_changes",
    "apply_checked",
    "as_format",
    "changed_class",
    "compose_heads",
    "differences_between",
    "differences_of",
    "is_bias_table",
    "originals_of",
    "read_layer",
    "read_manifest",
    "read_original",
    "replace_torch_layers",
    "returns_biases",
    "save",
    "set_count",
    "set_original_heads",
    "source_files",
    "update_heads",
    "update_sizes",
    "write_layer",
]
