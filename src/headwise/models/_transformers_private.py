"""What transformers, accelerate and torch.distributed keep to themselves or name by version.

Other files of this folder do not name their private parts, so that a new version is met here. What
is missing in one has a fallback: no cache, no hooks, no classes, no progress bar to hide.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Where modules and configurations store their numbers of heads.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_attn_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
QUERIES_PER_KV_HEAD = ("num_key_value_groups", "n_rep")
# The number of query heads times the head dimension.
WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "attn_dim")
# Transformers 5.24 renamed the argument and the output; until 5.40 callers may write either.
_CACHE_NAMES = ("cache", "past_key_values")


def cache_in(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments or the outputs of a forward pass, or None."""
    return next((values[name] for name in _CACHE_NAMES if values.get(name) is not None), None)


def cache_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward pass that takes its cache, or None."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in arguments), None)


def growing_layer(cache: Any, module: nn.Module, keys: Tensor) -> Any:
    """The layer of a cache that holds these keys of a module and only appends; None otherwise."""
    layers, index = getattr(cache, "layers", ()), getattr(module, "layer_idx", None)
    layer: Any = layers[index] if isinstance(index, int) and index < len(layers) else None
    # Other classes move, quantize or overwrite what they hold; this one makes new tensors by `cat`.
    is_growing = type(layer).__name__ == "DynamicLayer" and layer.keys is keys
    return layer if is_growing else None


@contextmanager
def progress_bar_in_terminals_only() -> Iterator[None]:
    """Show transformers' progress bar in a terminal, and not in a file or a pipe."""
    logging: Any = sys.modules.get("transformers.utils.logging")
    if sys.stderr.isatty() or logging is None or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def auto_classes(base: type, config: type) -> list[str]:
    """The AutoModel classes of transformers that choose `base` for its configuration, by name."""
    import transformers

    names = []
    # Other attributes are not touched: that would import all of transformers.
    for name in [name for name in dir(transformers) if name.startswith("AutoModel")]:
        mapping: Any = getattr(getattr(transformers, name), "_model_mapping", None)
        chosen = () if mapping is None else mapping.get(config, ())
        if base in (chosen if isinstance(chosen, tuple) else (chosen,)):
            names.append(name)
    return names


def leave_uninitialized(module: nn.Module) -> None:
    """Let transformers draw no weights for a module, whose weights are read from a file."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def label_shift(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function by which a model shifts labels to the right, for its decoder; None if there is
    none: a public method, that of T5 and its relatives, or a function beside the class."""
    for method in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        shift: Any = getattr(model, method, None)
        if shift is not None:
            return shift
    config = getattr(model, "config", None)
    ends = [getattr(config, f"{kind}_token_id", None) for kind in ("pad", "decoder_start")]
    for cls in type(model).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "shift_tokens_right", None)
        if function is not None:
            count = len(inspect.signature(function).parameters) - 1
            return lambda ids: function(ids, *ends[:count])
    return None


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks by which accelerate loads weights for each call of a module."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [] if hook is None else [hook, *getattr(hook, "hooks", ())]


def is_sharded(value: Any) -> bool:
    """Whether it is a distributed tensor, of which this process holds a part."""
    # Importing the module takes a while, and no tensor is of its type before.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def whole_tensor(value: Tensor) -> Tensor:
    """Gather a distributed tensor; a collective call that every process of its mesh must make."""
    sharded: Any = value
    return sharded.full_tensor() if is_sharded(value) else value


def config_of(module: nn.Module) -> Any:
    """The configuration of a module of Transformers, or None: that of its layer, where the layers
    of a model differ and the model's own refuses to say the sizes of one."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    is_by_layer = getattr(config, "is_heterogeneous", False) and layer is not None
    return config.per_layer_config[layer] if is_by_layer else config


def first_head_of(module: nn.Module, n_heads: int) -> int:
    """The number of the first head that this process computes, of a module of Transformers.

    Under tensor parallelism the rows of the query projection are shared out in equal parts. FSDP2
    gathers weights before a module is called, so that they are no distributed tensors then.
    """
    heads = getattr(config_of(module), "num_attention_heads", n_heads)
    if heads == n_heads:
        return 0
    for name, weight in module.named_parameters():
        if is_sharded(weight) and ("q_proj" in name or "query" in name):
            part: Any = weight
            mesh, places = part.device_mesh, part.placements
            for dim, place in enumerate(places):
                if place.is_shard(0) and n_heads * mesh.size(dim) == heads:
                    return int(mesh.get_local_rank(dim)) * n_heads
    return 0


def trainer_reporters(args: Any) -> list[Any]:
    """Callbacks like those that a trainer reports with, as `report_to` of its arguments says.

    A trainer shows its own ones to nobody. Theirs and these share the run of W&B or MLflow. For
    TensorBoard, which follows one file of a folder at a time, these write into a folder `heads`.
    """
    from transformers.integrations import get_reporting_integration_callbacks

    reporters = [reporter() for reporter in get_reporting_integration_callbacks(args.report_to)]
    for reporter in reporters:
        if hasattr(reporter, "logging_dir"):
            runs = reporter.logging_dir or os.path.join(args.output_dir, "runs")
            reporter.logging_dir = os.path.join(runs, "heads")
    return reporters
