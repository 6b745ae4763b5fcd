"""Methods that ablate one head after another, with a pass of the model for each."""

import torch

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead


def ablation(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """The increase of each text's loss when a head's output is replaced by its mean."""
    return _ablate_each(gated, removed, on_progress, mean=True)


def zero_ablation(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """The increase of each text's loss when a head's output is replaced by zeros."""
    return _ablate_each(gated, removed, on_progress, mean=False)


@torch.no_grad()
def _ablate_each(
    gated: GatedModel, removed: HeadMask, on_progress: Progress, *, mean: bool
) -> PerHead:
    gates, remaining = (~removed).double(), torch.nonzero(~removed).flatten().tolist()
    increases = []
    for index in range(len(gated.batches)):
        before = gated.losses(index, gates, mean)
        increase = torch.zeros(gated.texts(index), len(removed), dtype=torch.float64)
        for done, head in enumerate(remaining, index * len(remaining) + 1):
            without = gates.clone()
            without[head] = 0
            increase[:, head] = (gated.losses(index, without, mean) - before).double().cpu()
            on_progress(done, len(remaining) * len(gated.batches))
        increases.append(increase)
    return torch.cat(increases)
