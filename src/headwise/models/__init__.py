"""Other people's models: open them, find their heads, listen to their attention."""

from headwise.models._fingerprint import fingerprint
from headwise.models._open import load, load_tokenizer
from headwise.models._tokens import Batch, batches, encode, token_classes, token_strings
from headwise.models.hearing import Call, Hear, Inputs, Site, Sites, Text, listen

__all__ = [
    "Batch",
    "Call",
    "Hear",
    "Inputs",
    "Site",
    "Sites",
    "Text",
    "batches",
    "encode",
    "fingerprint",
    "listen",
    "load",
    "load_tokenizer",
    "token_classes",
    "token_strings",
]
