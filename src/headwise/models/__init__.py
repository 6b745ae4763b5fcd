"""Other people's models: open them, find their heads, listen to their attention."""

from headwise.models._fingerprint import fingerprint
from headwise.models._open import load, load_tokenizer
from headwise.models._tokens import Batch, batches, encode, token_classes, token_strings
from headwise.models._trainer import trainer_callback
from headwise.models.hearing import Call, Hear, Inputs, Running, Site, Sites, Text, listen
from headwise.models.owning import (
    Ablation,
    Attention,
    OutputProjection,
    ablate,
    by_attention,
    edit_heads,
    find_attentions,
    gate_heads,
    heads_of,
    mean_heads,
    output_projection,
)

__all__ = [
    "Ablation",
    "Attention",
    "Batch",
    "Call",
    "Hear",
    "Inputs",
    "OutputProjection",
    "Running",
    "Site",
    "Sites",
    "Text",
    "ablate",
    "batches",
    "by_attention",
    "edit_heads",
    "encode",
    "find_attentions",
    "fingerprint",
    "gate_heads",
    "heads_of",
    "listen",
    "load",
    "load_tokenizer",
    "mean_heads",
    "output_projection",
    "token_classes",
    "token_strings",
    "trainer_callback",
]
