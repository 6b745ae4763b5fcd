"""Reads the checkpoint of a training run and checks it before any of it is used."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from headwise._tensors import read_tensors
from headwise.errors import InputError
from headwise.lab._checkpoint import check_weights
from headwise.lab._model import MiniGPT

# The optimizer state of AdamW for each weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_FACTS = ("settings", "step", "seconds")
_WAY_OUT = "Train into another folder, or delete the file to start again."


@dataclass(frozen=True)
class RunState:
    """The state of a training run.

    Attributes:
        step: The number of steps done.
        seconds: The time spent on them.
        weights: The model's weights by name.
        moments: The optimizer state of each weight, in the order of `model.parameters()`.
    """

    step: int
    seconds: float
    weights: dict[str, Tensor]
    moments: dict[int, dict[str, Tensor]]


def read_facts(path: Path) -> tuple[dict[str, object], int, float]:
    """The settings, the number of steps and the seconds of a run.

    Raises:
        InputError: the file is not a checkpoint of a training run.
    """
    read_tensors(path)  # refuses a file that is not safetensors
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    if not about.keys() >= {*_FACTS}:
        raise InputError(
            f"train: {path} is not a checkpoint of a training run (its metadata has "
            f"{sorted(about)}). Train into another folder."
        )
    try:
        settings = json.loads(about["settings"])
        step, seconds = int(about["step"]), float(about["seconds"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"train: {path} cannot be read ({error}). {_WAY_OUT}") from error
    if not isinstance(settings, dict):
        raise InputError(f"train: {path} has settings {settings!r}, not an object. {_WAY_OUT}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InputError(f"train: {path} has {seconds=}. {_WAY_OUT}")
    return settings, step, seconds


def read_run(path: Path, model: MiniGPT, last: int) -> RunState:
    """The state of a run that trained a model of these sizes.

    The optimizer's fused kernel does not check the shape and dtype of its state; this does.

    Args:
        last: The number of steps of the whole run.
    Raises:
        InputError: a tensor is missing, unexpected, not finite, or has a wrong shape or dtype.
    """
    _, step, seconds = read_facts(path)
    if not 1 <= step <= last:
        raise InputError(f"train: {path} is of step {step}, not 1 to {last}. {_WAY_OUT}")
    tensors = read_tensors(path)
    weights = {
        name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")
    }
    check_weights(weights, model, path)
    expected: dict[str, tuple[Tensor, str]] = {
        f"model.{name}": (x, name) for name, x in model.state_dict().items()
    }
    scalar = torch.zeros((), dtype=torch.float32)
    for number, (name, weight) in enumerate(model.named_parameters()):
        for moment in _MOMENTS:
            expected_tensor = scalar if moment == "step" else weight
            expected[f"optimizer.{number}.{moment}"] = (expected_tensor, f"{moment} of {name}")
    _check_tensors(tensors, expected, path)
    moments: dict[int, dict[str, Tensor]] = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        moments[number] = {m: tensors[f"optimizer.{number}.{m}"] for m in _MOMENTS}
        _check_moments(moments[number], name, step, path)
    return RunState(step, seconds, weights, moments)


def _check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[Tensor, str]], path: Path
) -> None:
    """Refuse tensors that are missing, unexpected, not finite, or of a wrong shape or dtype."""
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise InputError(f"train: {path} lacks {name} ({expected[name][1]}). {_WAY_OUT}")
        if name not in expected:
            raise InputError(f"train: {path} holds {name}, which the run does not have. {_WAY_OUT}")
        expected_tensor, description = expected[name]
        has, needs = _kind(tensors[name]), _kind(expected_tensor)
        if has != needs:
            raise InputError(
                f"train: {name} ({description}) in {path} is {has}, not {needs}. {_WAY_OUT}"
            )
        if not tensors[name].isfinite().all():
            raise InputError(f"train: {name} ({description}) in {path} is not finite. {_WAY_OUT}")


def _check_moments(moments: Mapping[str, Tensor], name: str, step: int, path: Path) -> None:
    """Refuse negative second moments, and steps that differ from the run's."""
    least = moments["exp_avg_sq"].min().item()
    if least < 0:
        raise InputError(
            f"train: exp_avg_sq of {name} in {path} holds {least}, but squares are not negative. "
            f"{_WAY_OUT}"
        )
    if moments["step"].item() != step:
        raise InputError(
            f"train: step of {name} in {path} is {moments['step'].item():g}, but the run is at "
            f"step {step}. {_WAY_OUT}"
        )


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
