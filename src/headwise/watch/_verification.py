"""Refuses a call whose heads are not those that its captured inputs give."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.capture import AttentionCall, Site
from headwise.errors import UnsupportedError
from headwise.watch._positions import Positions

# The largest relative difference between our heads and the model's own.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


def verify_heads(
    site: Site,
    call: AttentionCall,
    heads: Float[Tensor, "B H R Dv"],
    lse: Float[Tensor, "B H R"],
    positions: Positions,
    rows: slice = slice(None),
) -> None:
    """Refuse a call some of whose heads differ from those that its captured inputs give.

    Large logits are rounded by more, and so are their exponentials: `lse` bounds them. Rows with
    NaN logits or without a visible key are not compared, because kernels treat them differently:
    where a mask adds its lowest number to all keys, eager attention has uniform weights.
    """
    theirs = call.heads[:, :, rows]
    ours = heads if call.join is None else call.join(heads.to(theirs.dtype))
    real = positions.query_real[:, None, rows, None] & (lse > -torch.inf).unsqueeze(-1)
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
                f"observe: {site} ({site.kernel}) returns NaN for queries "
                f"whose visible keys are all finite: NaN of padding spreads to them. Find its "
                f"source (eager attention in float64 can produce it), or leave the layer out with "
                f"layers=."
            )
        difference = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        difference = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    advice = "Leave its layer out with layers=, and please report it."
    if site.kernel == "softmax":  # by hand: its heads are the product of its weights and values
        advice = (
            "Its weights are changed after the softmax, as by a gate. Leave its layer out with "
            "layers=."
        )
    raise UnsupportedError(
        f"observe: {site} ({site.kernel}) does not compute attention from its captured "
        f"inputs: its heads and ours {difference}. {advice}"
    )


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0
