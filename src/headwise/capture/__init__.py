"""Capture every attention call of a model as it happens: its tensors, its rule and its site."""

from headwise.capture._capture import AttentionCall, Capture, ModuleCall, Site, find_stacks
from headwise.capture._inputs import InputTracker, StackInputs, Text
from headwise.capture._open import capture_calls, open_capture
from headwise.capture._softmax import SoftmaxCall

__all__ = [
    "AttentionCall",
    "Capture",
    "InputTracker",
    "ModuleCall",
    "Site",
    "SoftmaxCall",
    "StackInputs",
    "Text",
    "capture_calls",
    "find_stacks",
    "open_capture",
]
