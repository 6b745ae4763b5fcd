"""Heads and statistics from one pass in C++, where it was built: `source/` has it."""

from headwise.kernels.native import _operators as _operators
from headwise.kernels.native._compute import cannot, cannot_describe, is_packed, native_statistics
from headwise.kernels.native._gradients import attend_native

__all__ = ["attend_native", "cannot", "cannot_describe", "is_packed", "native_statistics"]
