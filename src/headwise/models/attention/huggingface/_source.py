"""What the source of a model says about the attention that it was written for."""

import inspect
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headwise._torch_private import constant_when_traced
from headwise.errors import UnsupportedError

# A condition on the name of the implementation, as in `if implementation in ("eager", "sdpa")`.
_CHOICE = re.compile(r"_attn_implementation\b.*(==|!=|\bin\b).*[\"']sdpa[\"']")
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


def _chooses(file: str) -> bool:
    """Whether a file treats `sdpa` otherwise than implementations that it does not know."""
    try:
        source = inspect.getsource(sys.modules[file])
    except (KeyError, OSError, TypeError):  # defined in a notebook, or compiled
        return False
    return _CHOICE.search(source) is not None


def check_source(module: type[nn.Module]) -> None:
    """Refuse a module that would leave out for us what it does for `sdpa`.

    Raises:
        UnsupportedError: its file chooses by the name of the implementation, in an unknown way.
    """
    if not _is_known(module.__module__):
        raise UnsupportedError(
            f"headwise attention: the source of {module.__name__} treats "
            f"attn_implementation='sdpa' in a way of its own. Load the model with "
            f"attn_implementation='sdpa'."
        )


@constant_when_traced  # a compiler would look through a cached function
def _is_known(file: str) -> bool:
    return _found_known(file)


@cache
def _found_known(file: str) -> bool:
    package = file.removeprefix("transformers.models.").split(".")[0]
    return package in KNOWN_CHOICES or not _chooses(file)


def is_written_for_eager(cls: type[Any]) -> bool:
    """Whether the models of a configuration, or of a module's file, expect the masks of `eager`.

    Those are floats, and always there unless every key is visible. Models that do not support
    `sdpa`, or that choose by the implementation's name, may rely on it: DeepSeek-V4 extends its
    mask by a bias, which it would leave out where `sdpa` has no mask, and turn around in booleans.
    """
    return _is_written_for_eager(
        cls.__module__.replace("configuration_", "modeling_"), cls.__name__
    )


@constant_when_traced
def _is_written_for_eager(file: str, config: str) -> bool:
    return file in sys.modules and _found_written_for_eager(file, config)


# Every layer asks at every token, which would take 40 µs: a tenth of a token in a small model.
@cache
def _found_written_for_eager(file: str, config: str) -> bool:
    models = _models(sys.modules[file])
    own = [model for model in models if getattr(model.config_class, "__name__", "") == config]
    return _chooses(file) or not all(model._supports_sdpa for model in own or models)


def _models(file: ModuleType) -> list[type[PreTrainedModel]]:
    """The models that a file defines."""
    classes = [value for value in vars(file).values() if isinstance(value, type)]
    models = [cls for cls in classes if issubclass(cls, PreTrainedModel)]
    return [cls for cls in models if cls.__module__ == file.__name__]
