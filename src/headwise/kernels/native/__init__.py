"""Heads and statistics from one pass in C++, where it was built: `source/` has it."""

from headwise.kernels.native._compute import attend_native, cannot, native_statistics

__all__ = ["attend_native", "cannot", "native_statistics"]
