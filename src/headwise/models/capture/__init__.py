"""Capture every attention call of a model as it happens: its tensors, its rule and its site."""

from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import AttentionCall
from headwise.models.capture._capture import capture_calls
from headwise.models.capture._inputs import InputTracker, StackInputs, Text
from headwise.models.capture._interception import Understanding
from headwise.models.capture._module_call import ModuleCall
from headwise.models.capture._sites import Coverage, Site, Sites
from headwise.models.capture._stacks import Stacks
from headwise.models.capture._torch_calls import ordinary_path
from headwise.models.capture.softmax import SoftmaxCall

__all__ = [
    "ActiveModules",
    "AttentionCall",
    "Coverage",
    "InputTracker",
    "ModuleCall",
    "Site",
    "Sites",
    "SoftmaxCall",
    "StackInputs",
    "Stacks",
    "Text",
    "Understanding",
    "capture_calls",
    "ordinary_path",
]
