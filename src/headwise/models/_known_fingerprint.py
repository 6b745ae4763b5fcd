"""The fingerprint of a model, computed again only after its weights have changed."""

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headwise._torch_private import is_materialized, version_of
from headwise.models._fingerprint import fingerprint as hash_weights
from headwise.models._fingerprint import is_wrapper
from headwise.models._sharded import is_sharded

# By model: what its weights were when they were hashed, and their hash.
_known: WeakKeyDictionary[nn.Module, tuple[Hashable, str]] = WeakKeyDictionary()
# The least number of entries of a weight that are compared: torch counts changes, but not those
# through `.data` or NumPy.
_SAMPLE = 512


def fingerprint(model: nn.Module) -> str:
    """Hash the name, shape, dtype and values of every weight, whatever its device.

    Weights are hashed again if one was exchanged or changed. Changes through `.data` or NumPy,
    which torch does not count, are found by comparing at least 512 evenly spaced entries of each
    weight, or all of a smaller one; such a change elsewhere is missed.

    Returns:
        16 hexadecimal digits, equal for equal models.
    """
    weights = _states_of(model)
    if weights is None:
        return hash_weights(model)
    known, digest = _known.get(model, (None, ""))
    if weights != known:
        digest = hash_weights(model)
        _known[model] = weights, digest
    return digest


def remember_fingerprint(model: nn.Module, digest: str) -> None:
    """Record the fingerprint of a model's present weights, so that they are not hashed again.

    Only for weights that were hashed elsewhere, such as by another process that opened the same
    files. Weights whose changes cannot be followed are hashed all the same.
    """
    weights = _states_of(model)
    if weights is not None:
        _known[model] = weights, digest


def _states_of(model: nn.Module) -> Hashable:
    """The state of every weight; None if that of one is unknown."""
    states = tuple(
        (name, _state_of(weight)) for name, weight in model.state_dict(keep_vars=True).items()
    )
    return None if any(state is None for _, state in states) else states


def _state_of(weight: Any) -> Hashable:
    """Which memory a weight is, and how often it was changed; None if that is unknown."""
    if not isinstance(weight, Tensor) or weight.is_meta or not is_materialized(weight):
        return None
    if is_sharded(weight) or is_wrapper(weight):  # all processes must gather it, or none
        return None
    if weight.is_inference() or weight.is_quantized or not weight.is_contiguous():
        return None
    entries = weight.detach().view(-1)
    sample = entries[:: max(1, weight.numel() // _SAMPLE)].contiguous().view(torch.uint8)
    place = weight.data_ptr(), tuple(weight.shape), weight.dtype, weight.device
    return *place, version_of(weight), sample.cpu().numpy().tobytes()
