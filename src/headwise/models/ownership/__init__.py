"""Which weights belong to which head, and editing or removing heads."""

from headwise.models.ownership._ablate import (
    Ablation,
    ablate,
    gate_heads,
    mean_heads,
    replace_heads,
)
from headwise.models.ownership._attention import (
    Attention,
    OutputProjection,
    by_attention,
    find_attentions,
    heads_of,
    is_linear,
    is_transposed,
    output_projection,
)
from headwise.models.ownership._edit import check_edits_reach, edit_heads
from headwise.models.ownership._kept_heads import KeptHeads, keep_heads, kept_indices, spread
from headwise.models.ownership._logit_rows import LogitRows, find_logit_rows
from headwise.models.ownership._logit_scaling import scale_rows
from headwise.models.ownership._model_runs import (
    batches_of,
    call_model,
    differs_from_itself,
    example_input,
    first_batch,
    float_outputs,
    output_difference,
)
from headwise.models.ownership._output_dependence import output_dependence
from headwise.models.ownership._ownership_map import (
    HeadCounts,
    OwnershipMap,
    Parts,
    attached_parts,
    count_heads,
    find_ownership,
)

__all__ = [
    "Ablation",
    "Attention",
    "HeadCounts",
    "KeptHeads",
    "LogitRows",
    "OutputProjection",
    "OwnershipMap",
    "Parts",
    "ablate",
    "attached_parts",
    "batches_of",
    "by_attention",
    "call_model",
    "check_edits_reach",
    "count_heads",
    "differs_from_itself",
    "edit_heads",
    "example_input",
    "find_attentions",
    "find_logit_rows",
    "find_ownership",
    "first_batch",
    "float_outputs",
    "gate_heads",
    "heads_of",
    "is_linear",
    "is_transposed",
    "keep_heads",
    "kept_indices",
    "mean_heads",
    "output_dependence",
    "output_difference",
    "output_projection",
    "replace_heads",
    "scale_rows",
    "spread",
]
