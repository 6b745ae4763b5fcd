"""The methods of `importance`: a further one is a function here, and a line of `METHODS`."""

from collections.abc import Callable

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring.methods._ablation import ablation, zero_ablation
from headwise.scoring.methods._gradients import curvature, gradient, half_gate
from headwise.scoring.methods._learned_gates import Gates, draw_gates, open_chance

__all__ = [
    "Gates",
    "ScoreHeads",
    "ablation",
    "curvature",
    "draw_gates",
    "function_of",
    "gates",
    "gradient",
    "half_gate",
    "open_chance",
    "zero_ablation",
]

ScoreHeads = Callable[[GatedModel, HeadMask, Progress], PerHead]
"""Scores every head in every text of a gated model, from which the masked heads are removed."""

gates = Gates()


def function_of(method: str) -> ScoreHeads:
    """The function of a method: it has the same name."""
    function: ScoreHeads = globals()[method.replace("-", "_")]
    return function
