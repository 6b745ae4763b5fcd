"""Other people's models: open them, find their heads, listen to their attention."""

from headwise.models._fingerprint import fingerprint
from headwise.models._open import load, load_tokenizer
from headwise.models._smaller import describe_smaller
from headwise.models._tokens import Batch, batches, encode, token_classes, token_strings
from headwise.models._trainer import trainer_callback
from headwise.models.hearing import Call, Hear, Inputs, Running, Site, Sites, Text, listen
from headwise.models.owning import (
    Ablation,
    Attention,
    Differences,
    OutputProjection,
    Share,
    ablate,
    by_attention,
    call_with,
    edit_heads,
    example_of,
    find_attentions,
    find_shares,
    gate_heads,
    heads_of,
    in_evaluation,
    mean_heads,
    output_projection,
    resize,
    set_count,
)

__all__ = [
    "Ablation",
    "Attention",
    "Batch",
    "Call",
    "Differences",
    "Hear",
    "Inputs",
    "OutputProjection",
    "Running",
    "Share",
    "Site",
    "Sites",
    "Text",
    "ablate",
    "batches",
    "by_attention",
    "call_with",
    "describe_smaller",
    "edit_heads",
    "encode",
    "example_of",
    "find_attentions",
    "find_shares",
    "fingerprint",
    "gate_heads",
    "heads_of",
    "in_evaluation",
    "listen",
    "load",
    "load_tokenizer",
    "mean_heads",
    "output_projection",
    "resize",
    "set_count",
    "token_classes",
    "token_strings",
    "trainer_callback",
]
