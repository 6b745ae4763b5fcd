"""The methods of `importance`, by name."""

from collections.abc import Mapping

from headwise.gauge.methods._learned import Gates, draw_gates, open_chance
from headwise.gauge.methods._leaving import ablation, zero_ablation
from headwise.gauge.methods._method import Method
from headwise.gauge.methods._slopes import curvature, gradient, half_gate

__all__ = ["METHODS", "RESUMABLE", "Gates", "Method", "draw_gates", "open_chance"]

METHODS: Mapping[str, Method] = {
    "half-gate": half_gate,
    "gradient": gradient,
    "curvature": curvature,
    "ablation": ablation,
    "zero-ablation": zero_ablation,
    "gates": Gates(),
}

# Those that take long and note what they found.
RESUMABLE = ("ablation", "zero-ablation")
