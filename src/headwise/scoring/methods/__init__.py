"""The methods of `importance`, by name: a further one is a function and a line of `METHODS`."""

from collections.abc import Callable, Mapping

from headwise._progress import Progress
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead
from headwise.scoring.methods._ablation import ablation, zero_ablation
from headwise.scoring.methods._gradients import curvature, gradient, half_gate
from headwise.scoring.methods._learned_gates import Gates, draw_gates, open_chance

__all__ = ["BY_TEXT", "METHODS", "RESUMABLE", "Gates", "Method", "draw_gates", "open_chance"]

Method = Callable[[GatedModel, HeadMask, Progress], PerHead]
"""Scores every head in every text of a gated model, from which the masked heads are removed."""

METHODS: Mapping[str, Method] = {
    "half-gate": half_gate,
    "gradient": gradient,
    "curvature": curvature,
    "ablation": ablation,
    "zero-ablation": zero_ablation,
    "gates": Gates(),
}

# Methods that score each text by itself. Mean ablation and gates need all texts.
BY_TEXT = ("half-gate", "gradient", "curvature", "zero-ablation")

# Methods that take long and save their scores as they go.
RESUMABLE = ("ablation", "zero-ablation")
