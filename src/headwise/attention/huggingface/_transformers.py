"""What is read of transformers' own code: mask functions, collected outputs, sources of models.

All of it may have another name in another version. Then masks stay tensors, which is slower, and
what cannot be done without is refused when it is needed, not on import.
"""

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import CellType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headwise._torch_private import constant_when_traced
from headwise.errors import UnsupportedError


def _part(module: str, name: str) -> Any:
    """A part of transformers; where this version has none, what refuses to be called."""
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        return partial(_refuse, name)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    version = getattr(sys.modules["transformers"], "__version__", "")
    raise UnsupportedError(
        f"headwise attention: transformers {version} has no {name}, which this call needs. "
        f"Load the model with attn_implementation='eager', or install a newer headwise."
    )


sdpa_attention_forward = _part("integrations.sdpa_attention", "sdpa_attention_forward")
sdpa_mask = _part("masking_utils", "sdpa_mask")
eager_mask = _part("masking_utils", "eager_mask")
CAUSAL = _part("masking_utils", "causal_mask_function")
BOTH_WAYS = _part("masking_utils", "bidirectional_mask_function")
_collector = _part("utils.output_capturing", "_active_collector")


def collects_weights() -> bool:
    """Whether the model that runs was asked for weights, which transformers collects by hooks."""
    if _is_refused(_collector):  # early versions of transformers 5 have none
        return False
    names = _collector.global_var if torch.compiler.is_compiling() else _collector.get()
    return bool(names) and any(name.endswith("attentions") for name in names)


def _is_refused(part: Any) -> bool:
    return isinstance(part, partial) and part.func is _refuse


# A function that says whether a query may attend to a key.
MaskFunction = Callable[..., Any]
_EMPTY = CellType()


def name_of(function: MaskFunction) -> str:
    """The function of transformers that made this one; empty if it was another."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return function.__qualname__.split(".")[0]


def variables_of(function: MaskFunction) -> dict[str, Any]:
    """The variables that a function was closed over."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    pairs = zip(names, cells, strict=True)
    return {name: cell.cell_contents for name, cell in pairs if cell != _EMPTY}


def combined(function: MaskFunction) -> list[MaskFunction]:
    """The functions all of which must allow a key."""
    if name_of(function) != "and_masks":
        return [function]
    parts = variables_of(function).get("mask_functions", ())
    return [each for part in parts for each in combined(part)] or [function]


# A condition on the name, whatever variable holds it: `if implementation in ("eager", "sdpa")`.
_CHOICE = re.compile(
    r"""(==|!=|\bcase|\bin\s*[(\[{](\s*["']\w+["'],)*)\s*["']sdpa["']|["']sdpa["']\s*(==|!=)"""
)
_INDICES = "it passes `indices=`, which are read"
# Models that choose by the name, and why they compute the same under ours.
KNOWN_CHOICES = {
    "axk2": _INDICES,
    "deepseek_v32": _INDICES,
    "dots3_note": _INDICES,
    "gemma4": "it drops queries, of which every mask tells what they see",
    "gemma4_unified": "it drops queries, of which every mask tells what they see",
    "glm5_next": "it makes the mask of `eager` for all but `sdpa`",
    "glm_moe_dsa": _INDICES,
    "hy_v4": _INDICES,
    "hy_v4_vl": _INDICES,
    "minimax_m3_vl": "it passes `block_indices=`, which are refused",
    "mistral_large4": _INDICES,
}


@cache  # reading a file takes milliseconds, and every layer asks at every token
def _chooses(file: str) -> bool:
    """Whether a file treats `sdpa` otherwise than implementations that it does not know."""
    try:
        source = inspect.getsource(sys.modules[file])
    except (KeyError, OSError, TypeError):  # defined in a notebook, or compiled
        return False
    return _CHOICE.search(source) is not None


def check_source(module: nn.Module) -> None:
    """Refuse a module that would leave out for us what it, or its model, does for `sdpa`.

    Raises:
        UnsupportedError: the module's file, or that of the model whose configuration it has,
            chooses by the name of the implementation, in an unknown way.
    """
    config = type(getattr(module, "config", None))
    if not (_is_known(type(module).__module__) and _is_known(_file_of_models(config))):
        raise UnsupportedError(
            f"headwise attention: the source of {type(module).__name__} treats "
            f"attn_implementation='sdpa' in a way of its own. Load the model with "
            f"attn_implementation='sdpa'."
        )


def _file_of_models(config: type[Any]) -> str:
    return config.__module__.replace("configuration_", "modeling_")


@constant_when_traced  # a compiler would look through a cached function
def _is_known(file: str) -> bool:
    package = file.removeprefix("transformers.models.").split(".")[0]
    return package in KNOWN_CHOICES or not _chooses(file)


def is_written_for_eager(cls: type[Any]) -> bool:
    """Whether the models of a configuration, or of a module's file, expect the masks of `eager`.

    Those are floats, and always there unless every key is visible. Models that do not support
    `sdpa`, or that choose by the implementation's name, may rely on it: DeepSeek-V4 extends its
    mask by a bias, which it would leave out where `sdpa` has no mask, and turn around in booleans.
    """
    return _file_is_written_for_eager(_file_of_models(cls), cls.__name__)


@constant_when_traced
def _file_is_written_for_eager(file: str, config: str) -> bool:
    return file in sys.modules and _found_written_for_eager(file, config)


# Every layer asks at every token, which would take 40 µs: a tenth of a token in a small model.
@cache
def _found_written_for_eager(file: str, config: str) -> bool:
    models = [
        cls
        for cls in vars(sys.modules[file]).values()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == file
    ]
    configs = {model: getattr(model, "config_class", None) for model in models}
    own = [model for model in models if getattr(configs[model], "__name__", "") == config]
    supports = [getattr(model, "_supports_sdpa", False) for model in own or models]
    return _chooses(file) or not all(supports)
