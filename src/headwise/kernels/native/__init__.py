"""Heads and statistics from one pass in C++, where it was built; its code is in `source/`."""

from headwise.kernels.native._kernel import NATIVE as NATIVE
from headwise.kernels.native._kernel import is_packed as is_packed
from headwise.kernels.native._kernel import native_is_faster as native_is_faster
from headwise.kernels.native._problem import most_threads as most_threads
