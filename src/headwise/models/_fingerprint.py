"""A short name for the weights of a model."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models._sharded import whole_tensor

# Settings that quantised modules keep among their weights.
_SETTINGS = (int, float, str, torch.dtype, type(None))


def fingerprint(model: nn.Module) -> str:
    """Hash the name, shape, dtype and values of every weight, whatever its device.

    Quantised weights are hashed as they are stored; weights that accelerate has offloaded are
    read from where it keeps them; sharded ones are gathered one after the other, so that every
    process must call this, and gets the fingerprint of the whole model.

    Returns:
        16 hexadecimal digits, equal for equal models.
    Raises:
        UnsupportedError: the values of a weight cannot be read.
    """
    digest = hashlib.blake2b(digest_size=8)
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    for name, value in sorted(state.items()):
        for part_name, part in _parts(model, name, value):
            if not isinstance(part, Tensor):
                digest.update(f"{part_name}{part}".encode())
                continue
            digest.update(f"{part_name}{tuple(part.shape)}{part.dtype}".encode())
            flat: Tensor = whole_tensor(part.detach()).cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(model: nn.Module, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain tensors and settings that an entry of a state dictionary consists of."""
    if isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _parts(model, f"{name}.{index}", part)
    elif isinstance(value, Tensor) and value.is_quantized:
        yield name, value.int_repr()
        yield from _parts(model, name, _steps(value))
    elif isinstance(value, Tensor):
        yield name, _offloaded(model, name) if value.is_meta else value
    elif isinstance(value, _SETTINGS):
        yield name, value
    else:
        raise UnsupportedError(
            f"fingerprint: {name} is a {type(value).__name__}, whose values cannot be read. Give "
            f"the model before its weights are packed."
        )


def _steps(weight: Tensor) -> tuple[Any, ...]:
    """How the stored integers of a quantised tensor become numbers."""
    if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return weight.q_scale(), weight.q_zero_point()
    return (
        weight.q_per_channel_scales(),
        weight.q_per_channel_zero_points(),
        weight.q_per_channel_axis(),
    )


def _offloaded(model: nn.Module, name: str) -> Tensor:
    """The value of a weight that accelerate loads for each call of its module."""
    parts = name.split(".")
    for end in reversed(range(len(parts))):
        hook: Any = getattr(model.get_submodule(".".join(parts[:end])), "_hf_hook", None)
        for part in (hook, *getattr(hook, "hooks", ())):
            weights: Mapping[str, Tensor] = getattr(part, "weights_map", None) or {}
            with_name = ".".join(parts[end:])
            if with_name in weights:
                return weights[with_name]
    raise UnsupportedError(
        f"fingerprint: {name} has no values: it is on the meta device. Load the weights first."
    )
