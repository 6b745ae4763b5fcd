"""The methods of `importance`: a further one is a function here, and a line of `METHODS`."""

from collections.abc import Callable

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring.methods._ablation import ablation as ablation
from headwise.scoring.methods._ablation import zero_ablation as zero_ablation
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
