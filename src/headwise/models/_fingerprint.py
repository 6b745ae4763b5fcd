"""A short name for the weights of a model, computed again only after they have changed."""

import hashlib
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from headwise._display import type_of
from headwise._torch_private import is_materialized, version_of
from headwise.errors import UnsupportedError
from headwise.models._model import without_compiler
from headwise.models._transformers_private import is_sharded, offload_hooks, whole_tensor

# Settings that quantized modules keep among their weights.
_SETTINGS = (int, float, str, torch.dtype, type(None))
# Where an object is in memory, in its description.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# By model: what its weights were when they were hashed, and their hash. To compare them takes 2 ms
# in place of 300 ms for 50 million weights, and every table, plan and study asks.
_known: WeakKeyDictionary[nn.Module, tuple[Hashable, str]] = WeakKeyDictionary()
# The least number of entries of a weight that are compared: torch counts changes, but not those
# through `.data` or NumPy.
_SAMPLE = 512


def fingerprint(model: nn.Module) -> str:
    """Hash the name, shape, dtype and values of every weight, whatever its device.

    Weights are hashed again if one was exchanged or changed. Changes through `.data` or NumPy,
    which torch does not count, are found by comparing at least 512 evenly spaced entries of each
    weight, or all of a smaller one; such a change elsewhere is missed.

    Quantized weights are hashed as they are stored, those of torchao and others that wrap several
    tensors by these tensors and their settings; weights that accelerate has offloaded are
    read from where it keeps them; sharded ones are gathered one after the other, so that every
    process must call this, and gets the fingerprint of the whole model. A model inside
    `DistributedDataParallel`, or compiled, has the fingerprint of the model itself.

    Returns:
        16 hexadecimal digits, equal for equal models.
    Raises:
        UnsupportedError: the values of a weight cannot be read.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return fingerprint(model.module)
    model = without_compiler(model)
    weights = _states_of(model)
    if weights is None:
        return hash_weights(model)
    known, digest = _known.get(model, (None, ""))
    if weights != known:
        digest = hash_weights(model)
        _known[model] = weights, digest
    return digest


def _states_of(model: nn.Module) -> Hashable:
    """Which memory each weight is, how often it was changed, and evenly spaced entries; None if
    that of one is unknown."""
    weights = model.state_dict(keep_vars=True)
    tensors = [weight for weight in weights.values() if isinstance(weight, Tensor)]
    # A sharded weight is not materialized: all processes must gather one, or none.
    if len(tensors) < len(weights) or not is_materialized(*tensors):
        return None
    if any(x.is_meta or x.is_inference() or x.is_quantized for x in tensors):
        return None
    if not all(x.is_contiguous() for x in tensors):
        return None
    return tuple(
        (name, x.data_ptr(), tuple(x.shape), x.dtype, x.device, version_of(x), _sample_of(x))
        for name, x in weights.items()
    )


def _sample_of(weight: Tensor) -> bytes:
    weight, step = weight.detach(), max(1, weight.numel() // _SAMPLE)
    if weight.is_cpu and weight.dtype in (torch.float32, torch.float16):  # less work for NumPy
        return weight.numpy().reshape(-1)[::step].tobytes()
    sample = weight.view(-1)[::step].contiguous().view(torch.uint8)
    return sample.cpu().numpy().tobytes()


def hash_weights(model: nn.Module) -> str:
    """Hash every weight of a model, as `fingerprint` does, whether or not its hash is known."""
    digest = hashlib.blake2b(digest_size=8)
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    for name, value in sorted(state.items()):
        for part_name, part in _parts(model, name, value):
            if not isinstance(part, Tensor):
                digest.update(f"{part_name}{part}".encode())
                continue
            digest.update(f"{part_name}{tuple(part.shape)}{part.dtype}".encode())
            digest.update(_bytes_of(part_name, part).data)
    return digest.hexdigest()


def _bytes_of(name: str, weight: Tensor) -> np.ndarray:
    try:
        flat: Tensor = whole_tensor(weight.detach()).cpu().contiguous().flatten()
        return flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError, AttributeError) as error:
        if type(weight) in (Tensor, nn.Parameter):
            raise
        raise _unreadable(name, weight) from error


def _parts(model: nn.Module, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain tensors and settings that an entry of a state dictionary consists of."""
    if isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _parts(model, f"{name}.{index}", part)
    elif isinstance(value, Tensor) and value.is_quantized:
        yield name, value.int_repr()
        yield from _parts(model, name, _steps(value))
    # Made of other tensors, as quantized ones of torchao are; sharded ones are gathered instead.
    elif getattr(value, "__tensor_flatten__", None) is not None and not is_sharded(value):
        names, settings = value.__tensor_flatten__()
        yield name, f"{type(value).__name__}{_ADDRESS.sub('', repr(settings))}"
        for part in names:
            yield from _parts(model, f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Tensor):
        yield name, _offloaded(model, name) if value.is_meta else value
    elif isinstance(value, _SETTINGS):
        yield name, value
    else:
        raise _unreadable(name, value)


def _unreadable(name: str, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"fingerprint: {name} is {type_of(value)}, whose values cannot be read. Give "
        f"the model before its weights are packed."
    )


def _steps(weight: Tensor) -> tuple[Any, ...]:
    """How the stored integers of a quantized tensor become numbers."""
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
        with_name = ".".join(parts[end:])
        for hook in offload_hooks(model.get_submodule(".".join(parts[:end]))):
            weights: Mapping[str, Tensor] = getattr(hook, "weights_map", None) or {}
            if with_name in weights:
                return weights[with_name]
    raise UnsupportedError(
        f"fingerprint: {name} has no values: it is on the meta device. Load the weights first."
    )
