"""Which part of a model belongs to which head, and taking that part away."""

from headwise._evaluation import in_evaluation
from headwise.models.ownership._ablate import (
    Ablation,
    ablate,
    gate_heads,
    mean_heads,
    replace_heads,
)
from headwise.models.ownership._attention import (
    Attention,
    by_attention,
    find_attentions,
    heads_of,
)
from headwise.models.ownership._edit import edit_heads
from headwise.models.ownership._example_input import (
    batches_of,
    call_model,
    example_input,
)
from headwise.models.ownership._ownership_map import (
    HeadCounts,
    OwnershipMap,
    Parts,
    attached_parts,
    count_heads,
    find_ownership,
)
from headwise.models.ownership._projection import (
    OutputProjection,
    is_linear,
    is_transposed,
    output_projection,
)

__all__ = [
    "Ablation",
    "Attention",
    "HeadCounts",
    "OutputProjection",
    "OwnershipMap",
    "Parts",
    "ablate",
    "attached_parts",
    "batches_of",
    "by_attention",
    "call_model",
    "count_heads",
    "edit_heads",
    "example_input",
    "find_attentions",
    "find_ownership",
    "gate_heads",
    "heads_of",
    "in_evaluation",
    "is_linear",
    "is_transposed",
    "mean_heads",
    "output_projection",
    "replace_heads",
]
