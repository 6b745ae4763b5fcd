"""Heads and statistics from one pass in Triton, for GPUs."""

from headwise.kernels.triton._kernel import TRITON as TRITON
from headwise.kernels.triton._kernel import TritonKernel as TritonKernel
from headwise.kernels.triton._kernel import is_installed as is_installed
