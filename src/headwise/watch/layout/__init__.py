"""The layout of a call: where its queries and keys lie in their texts, and which rows count."""

from headwise.watch.layout._call_layouts import CallLayout, CallLayouts
from headwise.watch.layout._pairs import TextPairs
from headwise.watch.layout._positions import NONE, Positions
from headwise.watch.layout._spans import Stretch, TextSpans, read_stretches, stretch_tokens

__all__ = [
    "NONE",
    "CallLayout",
    "CallLayouts",
    "Positions",
    "Stretch",
    "TextPairs",
    "TextSpans",
    "read_stretches",
    "stretch_tokens",
]
