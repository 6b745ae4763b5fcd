"""Other people's models as a whole: checked, hooked, fingerprinted, and fed with texts.

What is asked of every model is here, and `texts` makes its inputs. Their attention calls, heads and
files have rooms of their own: `capture`, `ownership` and `checkpoints`.
"""

from headwise.models._fingerprint import fingerprint
from headwise.models._hooks import (
    Block,
    Hooks,
    SharedSetting,
    clear_leftovers,
    hooked,
    ordinary_path,
)
from headwise.models._libraries import (
    auto_classes,
    cache_argument,
    cache_in,
    first_head_of,
    growing_layer,
    is_sharded,
    leave_uninitialized,
    offload_hooks,
    progress_bar_in_terminals_only,
)
from headwise.models._model import (
    around,
    check_device,
    check_model,
    check_weights,
    device_of,
    is_sentence_transformer,
    model_inputs,
    sentence_embedding,
    transformer_name,
    without_adapters,
    without_compiler,
)

__all__ = [
    "Block",
    "Hooks",
    "SharedSetting",
    "around",
    "auto_classes",
    "cache_argument",
    "cache_in",
    "check_device",
    "check_model",
    "check_weights",
    "clear_leftovers",
    "device_of",
    "fingerprint",
    "first_head_of",
    "growing_layer",
    "hooked",
    "is_sentence_transformer",
    "is_sharded",
    "leave_uninitialized",
    "model_inputs",
    "offload_hooks",
    "ordinary_path",
    "progress_bar_in_terminals_only",
    "sentence_embedding",
    "transformer_name",
    "without_adapters",
    "without_compiler",
]
