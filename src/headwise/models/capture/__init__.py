"""Capture every attention call of a model as it happens: its tensors, its rule and its site."""

from headwise.models.capture._capture import AttentionCall, Capture, ModuleCall, Site, find_stacks
from headwise.models.capture._inputs import InputTracker, StackInputs, Text
from headwise.models.capture._open import capture_calls, open_capture
from headwise.models.capture._softmax import SoftmaxCall
from headwise.models.capture._torch_calls import ordinary_path

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
    "ordinary_path",
]
