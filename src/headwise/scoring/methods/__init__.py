"""The methods of `importance`, by name."""

from collections.abc import Mapping

from headwise.scoring.methods._ablation import ablation, zero_ablation
from headwise.scoring.methods._gradients import curvature, gradient, half_gate
from headwise.scoring.methods._learned_gates import Gates, draw_gates, open_chance
from headwise.scoring.methods._method import Method

__all__ = ["METHODS", "RESUMABLE", "Gates", "Method", "draw_gates", "open_chance"]

METHODS: Mapping[str, Method] = {
    "half-gate": half_gate,
    "gradient": gradient,
    "curvature": curvature,
    "ablation": ablation,
    "zero-ablation": zero_ablation,
    "gates": Gates(),
}

# Methods that take long and save their scores as they go.
RESUMABLE = ("ablation", "zero-ablation")
