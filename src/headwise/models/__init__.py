"""Other people's models: open them, find their heads, listen to their attention."""

from headwise.models._call import Call, Hear
from headwise.models._fingerprint import fingerprint
from headwise.models._inputs import Inputs, Text
from headwise.models._listen import listen
from headwise.models._open import load, load_tokenizer
from headwise.models._tokens import Batch, batches, encode, token_classes, token_strings
from headwise.models._where import Site, Sites

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
