"""Heads and statistics from one pass in Triton, for GPUs; unmeasured so far."""

from headwise.kernels.triton._compute import (
    attend_triton,
    cannot,
    is_installed,
    triton_statistics,
)

__all__ = ["attend_triton", "cannot", "is_installed", "triton_statistics"]
