"""Heads and statistics from one pass in Triton, for GPUs."""

from headwise.kernels.triton._kernel import TRITON, is_installed

__all__ = ["TRITON", "is_installed"]
