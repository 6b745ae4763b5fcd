"""Whether a call was understood: the heads that follow from it are the model's own."""

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.models import Site
from headwise.watch._places import Places

# How far our heads may lie from the model's own before we say that we misread the call.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
_STEPS = 8  # roundings of a logit that may add up


def compare(site: Site, theirs: Tensor, ours: Tensor, lse: Tensor, places: Places) -> None:
    """Refuse a call whose heads don't follow from what was understood of it.

    Large logits are rounded by more, and their exponentials with them: `lse` says how large.
    """
    real = places.query_real[:, None, :, None]
    logits = torch.where(real[..., 0] & lse.isfinite(), lse, 0.0).abs().max().item()
    rounding = _STEPS * torch.finfo(torch.float32).eps * logits
    if theirs.shape == ours.shape:
        gap = torch.where(real, theirs.to(ours.dtype) - ours, 0.0).abs().max().item()
        size = torch.where(real, ours, 0.0).abs().max().item()
        if gap <= (_TOLERANCE.get(theirs.dtype, 1e-4) + rounding) * max(size, 1e-6):
            return
        found = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        found = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute what was understood of it: its "
        f"heads and ours {found}. Leave its layer out with layers=, and please report it."
    )
