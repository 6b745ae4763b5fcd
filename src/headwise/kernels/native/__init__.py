"""Heads and statistics from one pass in C++, where it was built; its code is in `source/`."""

from headwise.kernels.native import _operators as _operators
from headwise.kernels.native._compute import is_packed
from headwise.kernels.native._gradients import attend_native
from headwise.kernels.native._kernel import (
    NATIVE,
    is_faster_than_a_call,
    is_shorter_than_a_call,
)

__all__ = [
    "NATIVE",
    "attend_native",
    "is_faster_than_a_call",
    "is_packed",
    "is_shorter_than_a_call",
]
