"""Refuse calls that do not compute attention from their captured inputs."""

from typing import NoReturn

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.models import Site
from headwise.watch.layout import Positions

# The largest relative difference between our heads and the model's own.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


def refuse_wrapped() -> NoReturn:
    """Refuse tensors without values, as torch.func transforms make them."""
    raise UnsupportedError(
        "observe: values are not available inside a transform of torch.func (grad, vmap, jvp). "
        "Watch a call outside of it; per-text statistics come from Request(per_text=True)."
    )


def verify_heads(
    site: Site, theirs: Tensor, ours: Tensor, lse: Tensor, positions: Positions
) -> None:
    """Refuse a call whose heads differ from those that its captured inputs give.

    Large logits are rounded by more, and so are their exponentials: `lse` bounds them. Rows with
    NaN logits are not compared, because kernels treat them differently.
    """
    real = positions.query_real[:, None, :, None] & ~lse.isnan().unsqueeze(-1)
    logits = _largest(torch.where(real[..., 0] & lse.isfinite(), lse, 0.0))
    rounding = _STEPS * torch.finfo(torch.float32).eps * logits
    if theirs.shape == ours.shape:
        differs = real & (theirs != ours) & ~(theirs.isnan() & ours.isnan())
        gap = _largest(torch.where(differs, theirs.to(ours.dtype) - ours, 0.0))
        size = _largest(torch.where(real, ours, 0.0).nan_to_num(0.0, 0.0, 0.0))
        if gap <= (_TOLERANCE.get(theirs.dtype, 1e-4) + rounding) * max(size, 1e-6):
            return
        if gap != gap:
            raise UnsupportedError(
                f"observe: {site.name} ({site.kernel}) returns NaN for queries "
                f"whose visible keys are all finite: NaN of padding spreads to them. Find its "
                f"source (eager attention in float64 can produce it), or leave the layer out with "
                f"layers=."
            )
        difference = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        difference = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute attention from its captured "
        f"inputs: its heads and ours {difference}. Leave its layer out with layers=, and please "
        f"report it."
    )


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
