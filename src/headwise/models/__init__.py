"""Other people's models: open them, find their heads, listen to their attention."""

from headwise.models._fingerprint import fingerprint
from headwise.models._open import load, load_tokenizer
from headwise.models._tokens import Batch, batches, encode, token_classes, token_strings
from headwise.models.hearing import Call, Hear, Inputs, Site, Sites, Text, listen
from headwise.models.owning import OutputProjection, output_projection

__all__ = [
    "Batch",
    "Call",
    "Hear",
    "Inputs",
    "OutputProjection",
    "Site",
    "Sites",
    "Text",
    "batches",
    "encode",
    "fingerprint",
    "listen",
    "load",
    "load_tokenizer",
    "output_projection",
    "token_classes",
    "token_strings",
]
