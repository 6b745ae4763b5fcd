"""Every attention call of a model, heard as it happens: what it was and where."""

from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import Answer, AttentionCall, Hear
from headwise.models.capture._capture import capture_calls
from headwise.models.capture._coverage import Coverage, unsupported
from headwise.models.capture._inputs import InputTracker, Text
from headwise.models.capture._sites import Site, Sites

__all__ = [
    "ActiveModules",
    "Answer",
    "AttentionCall",
    "Coverage",
    "Hear",
    "InputTracker",
    "Site",
    "Sites",
    "Text",
    "capture_calls",
    "unsupported",
]
