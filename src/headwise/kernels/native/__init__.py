"""Heads and statistics from one pass in C++, where it was built: `source/` has it."""

from headwise.kernels.native._compute import cannot, native_statistics
from headwise.kernels.native._gradients import attend_native

__all__ = ["attend_native", "cannot", "native_statistics"]
