"""Checkpoints: one reader of every model, and one writer, for every format."""

from headwise.checkpoints._formats import prepare
from headwise.checkpoints._fresh_process import SENTENCES
from headwise.checkpoints._load import load, load_tokenizer
from headwise.checkpoints._manifest import (
    write_layer,
)
from headwise.checkpoints._original_heads import (
    compose_heads,
    originals_of,
    set_original_heads,
)
from headwise.checkpoints._resize import (
    CONFIG_PREFIX,
    BiasHeads,
    LayerConfig,
    is_bias_table,
    returns_biases,
    set_count,
    update_sizes,
)
from headwise.checkpoints._save import save
from headwise.checkpoints._source_files import source_files
from headwise.checkpoints._torch_layer import (
    TorchCompatibleAttention,
    replace_torch_layers,
    update_heads,
)

__all__ = [
    "CONFIG_PREFIX",
    "SENTENCES",
    "BiasHeads",
    "LayerConfig",
    "TorchCompatibleAttention",
    "compose_heads",
    "is_bias_table",
    "load",
    "load_tokenizer",
    "originals_of",
    "prepare",
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
