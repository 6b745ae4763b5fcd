"""Whether a call was understood: the heads that follow from it are the model's own."""

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.models import Site
from headwise.watch._places import Places

# How far our heads may lie from the model's own before we say that we misread the call.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}


def compare(site: Site, theirs: Tensor, ours: Tensor, places: Places) -> None:
    """Refuse a call whose heads don't follow from what was understood of it."""
    real = places.query_real[:, None, :, None]
    if theirs.shape == ours.shape:
        gap = torch.where(real, theirs.to(ours.dtype) - ours, 0.0).abs().max().item()
        size = torch.where(real, ours, 0.0).abs().max().item()
        if gap <= _TOLERANCE.get(theirs.dtype, 1e-4) * max(size, 1e-6):
            return
        found = f"differ by {gap:.2g} at a size of {size:.2g}"
    else:
        found = f"have shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    raise UnsupportedError(
        f"observe: {site.name} ({site.kernel}) does not compute what was understood of it: its "
        f"heads and ours {found}. Leave its layer out with layers=, and please report it."
    )
