"""Which part of a model belongs to which head, and taking that part away."""

from headwise.models.owning._ablate import Ablation, ablate, gate_heads, mean_heads
from headwise.models.owning._attention import (
    Attention,
    by_attention,
    find_attentions,
    heads_of,
)
from headwise.models.owning._edit import edit_heads
from headwise.models.owning._projection import OutputProjection, output_projection

__all__ = [
    "Ablation",
    "Attention",
    "OutputProjection",
    "ablate",
    "by_attention",
    "edit_heads",
    "find_attentions",
    "gate_heads",
    "heads_of",
    "mean_heads",
    "output_projection",
]
