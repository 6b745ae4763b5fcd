"""Heads and statistics from one pass in C++, where it was built; its code is in `source/`."""

from headwise.kernels.native._kernel import NATIVE, is_faster_than_a_call, is_packed
from headwise.kernels.native._problem import most_threads

__all__ = ["NATIVE", "is_faster_than_a_call", "is_packed", "most_threads"]
