"""The methods of `importance`: a further one is a function here, and a line of `METHODS`."""

from collections.abc import Callable

import torch

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring.methods._gradients import curvature as curvature
from headwise.scoring.methods._gradients import gradient as gradient
from headwise.scoring.methods._gradients import half_gate as half_gate
from headwise.scoring.methods._learned_gates import Gates as Gates
from headwise.scoring.methods._learned_gates import draw_gates as draw_gates
from headwise.scoring.methods._learned_gates import open_chance as open_chance

ScoreHeads = Callable[[GatedModel, HeadMask, Progress], PerHead]
"""Scores every head in every text of a gated model, from which the masked heads are removed."""

gates = Gates()


def function_of(method: str) -> ScoreHeads:
    """The function of a method: it has the same name."""
    function: ScoreHeads = globals()[method.replace("-", "_")]
    return function


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
