"""Every attention call of a model, heard as it happens: what it was and where."""

from headwise.models.hearing._call import Answer, Call, Hear
from headwise.models.hearing._coverage import Coverage, unsupported
from headwise.models.hearing._inputs import Inputs, Text
from headwise.models.hearing._listen import listen
from headwise.models.hearing._running import Running
from headwise.models.hearing._where import Site, Sites

__all__ = [
    "Answer",
    "Call",
    "Coverage",
    "Hear",
    "Inputs",
    "Running",
    "Site",
    "Sites",
    "Text",
    "listen",
    "unsupported",
]
