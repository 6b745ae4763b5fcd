"""Models of Hugging Face that heads were cut out of: what is written beside them, and back."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.files import read_object
from headwise.models.checkpoints._differences import Differences
from headwise.models.checkpoints._original import ORIGINAL, read_original, set_original_heads

FORMAT = "headwise-smaller/1"


def describe_changes(model: nn.Module) -> dict[str, Any] | None:
    """What a model of Hugging Face is beside its configuration; None if that says all.

    Raises:
        UnsupportedError: its class is not one of transformers.
    """
    import transformers

    name = type(model).__name__
    cls = getattr(transformers, name, None)
    if not isinstance(model, transformers.PreTrainedModel) or cls is None:
        raise UnsupportedError(
            f"save: {name} is no class of transformers, which alone could be loaded again. Keep "
            f"its state_dict, and cut the model anew before it is loaded."
        )
    about = differences_of(model)
    return None if about is None else {"format": FORMAT, "architecture": name, **about}


def differences_of(model: nn.Module) -> dict[str, Any] | None:
    """How a model differs from what its configuration builds, to be written as JSON."""
    cls: Any = type(model)
    with torch.device("meta"):
        built = cls(model.config)
    about = asdict(Differences.between(model, built))
    return about if any(about.values()) else None


def apply_changes(model: nn.Module, about: Any) -> None:
    """Make a model that its configuration has built into the one that `differences_of` told of.

    Raises:
        InputError: it cannot be read.
    """
    content = about if isinstance(about, dict) else {}
    Differences.read(content, "headwise.json").apply(model)
    set_original_heads(model, read_original(content.get(ORIGINAL), "headwise.json"))


def read_changes(folder: Path) -> dict[str, Any] | None:
    """What `describe_smaller` said of the model in a folder; None if it is another's folder."""
    path = folder / "headwise.json"
    if not path.is_file():
        return None
    content = read_object(path, "load", "Save the model again.")
    return content if content.get("format") == FORMAT else None


def changed_class(content: Mapping[str, Any], folder: Path) -> Any:
    """The class whose models begin smaller than their configuration says.

    Raises:
        InputError: it is not a class of transformers, or what differs cannot be read.
    """
    import transformers

    name = content.get("architecture")
    base: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(base, type) or not issubclass(base, transformers.PreTrainedModel):
        raise InputError(
            f"load: {folder} asks for the class {name!r}, which transformers does not have, and "
            f"nothing else is run. Give a folder that headwise saved."
        )
    differences = Differences.read(content, str(folder / "headwise.json"))

    def begin(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)  # type: ignore[misc]
        differences.apply(self)

    # Its name and place are those of the base: by them transformers knows how to read weights.
    return type(base.__name__, (base,), {"__init__": begin, "__module__": base.__module__})
