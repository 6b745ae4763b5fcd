"""Which part of a model belongs to which head, and taking that part away."""

from headwise._evaluation import in_evaluation
from headwise.models.owning._ablate import (
    Ablation,
    ablate,
    gate_heads,
    mean_heads,
    replace_heads,
)
from headwise.models.owning._attention import (
    Attention,
    by_attention,
    find_attentions,
    heads_of,
)
from headwise.models.owning._edit import edit_heads
from headwise.models.owning._example import (
    batches_of,
    call_with,
    example_of,
)
from headwise.models.owning._projection import (
    OutputProjection,
    is_linear,
    is_transposed,
    output_projection,
)
from headwise.models.owning._shares import (
    Counts,
    Parts,
    Share,
    attached_parts,
    count_heads,
    find_shares,
)

__all__ = [
    "Ablation",
    "Attention",
    "Counts",
    "OutputProjection",
    "Parts",
    "Share",
    "ablate",
    "attached_parts",
    "batches_of",
    "by_attention",
    "call_with",
    "count_heads",
    "edit_heads",
    "example_of",
    "find_attentions",
    "find_shares",
    "gate_heads",
    "heads_of",
    "in_evaluation",
    "is_linear",
    "is_transposed",
    "mean_heads",
    "output_projection",
    "replace_heads",
]
