"""Scale rows of weights in place: all of them or none, sharded weights too."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class ScaledRows:
    """Rows of one parameter, each owned by a head or by a group that shares keys.

    Attributes:
        parameter: Its qualified name.
        shape: The shape in which a factor for each row is multiplied with it.
        owners: The owner of each row; -1 if the row is not scaled.
    """

    parameter: str
    shape: tuple[int, ...]
    owners: Int[Tensor, " n"]


@torch.no_grad()
def scale_rows(model: nn.Module, changes: Iterable[tuple[ScaledRows, Tensor]]) -> dict[str, Tensor]:
    """Multiply rows by the factors of their owners; an exception leaves all as they were.

    Returns:
        The former values of what was changed, by parameter; `restore_rows` writes them back.
    """
    reshard(model)
    factors: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for rows, per_owner in changes:
        is_owned = rows.owners >= 0
        factor = torch.where(is_owned, per_owner.cpu()[rows.owners.clamp(min=0)], 1.0)
        if rows.parameter in factors:
            factor = factor * factors[rows.parameter][1]
        factors[rows.parameter] = (rows.shape, factor)
    ready = {
        name: (weight, _fitted(name, factor, shape, weight))
        for name, (shape, factor) in factors.items()
        if (factor != 1.0).any()
        for weight in [model.get_parameter(name)]
    }
    saved: dict[str, Tensor] = {}
    try:
        for name, (weight, factor) in ready.items():
            saved[name] = weight.detach().clone()
            weight.mul_(factor)
        return saved
    except BaseException:
        restore_rows(model, saved)
        raise


@torch.no_grad()
def restore_rows(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write back what `scale_rows` has changed."""
    reshard(model)
    for name, values in saved.items():
        model.get_parameter(name).copy_(values)


def reshard(model: nn.Module) -> None:
    """Free the copies of weights that FSDP2 gathers and that autocast casts."""
    torch.clear_autocast_cache()
    module: Any  # FSDP2 gives each module that it shards these methods
    for module in model.modules():
        if hasattr(module, "reshard") and hasattr(module, "unshard"):
            module.reshard()


def _fitted(name: str, factor: Tensor, shape: tuple[int, ...], weight: Any) -> Tensor:
    """The factors in the shape, the dtype and the sharding of a weight."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    ready = factor.to(device=weight.device, dtype=dtype).view(shape)
    axis = next((i for i, n in enumerate(ready.shape) if n > 1), 0)
    fits = all(n in (1, m) for n, m in zip(ready.shape, weight.shape, strict=True))
    if not hasattr(weight, "device_mesh"):
        if fits:
            return ready
    else:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh, local = weight.device_mesh, weight.to_local()
        if fits:  # of the whole weight, of which each rank holds some rows
            return DTensor.from_local(ready, mesh, [Replicate()] * mesh.ndim, run_check=False)
        # Under tensor parallelism the rows are those of this rank's heads.
        if mesh.ndim == 1 and local.shape[axis] == ready.shape[axis]:
            return DTensor.from_local(ready, mesh, [Shard(axis)], run_check=False)
    raise UnsupportedError(
        f"QKClip: {name} has shape {tuple(weight.shape)}, expected {tuple(ready.shape)}: the "
        f"weight changed after the clip was made, or is sharded along several axes of a mesh. "
        f"Make a new clip, or shard along one axis."
    )
