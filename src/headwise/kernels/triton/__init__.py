"""Heads and statistics from one pass in Triton, for GPUs; unmeasured so far."""

from headwise.kernels.triton._compute import is_installed
from headwise.kernels.triton._kernel import TRITON

__all__ = ["TRITON", "is_installed"]
