"""Smaller batches when memory runs out."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["halving"]

T = TypeVar("T")


def halving(caller: str, work: Callable[[int], T], size: int) -> T:
    """The result of `work` with at most `size` texts in a batch; half as many if memory runs out.

    The work starts anew each time, so nothing of a failed pass is counted. A warning says so once.

    Args:
        caller: The function that the warning names.
        work: Called with the most texts in a batch.
    Raises:
        OutOfMemoryError: a single text does not fit into memory.
    """
    said = False
    while True:
        try:
            return work(size)
        except (MemoryError, RuntimeError) as error:  # torch's error for a GPU is a RuntimeError
            if size < 2 or not _is_out_of_memory(error):
                raise
        # Here the error and the tensors in its frames are gone.
        if not said:
            warnings.warn(
                f"{caller}: out of memory with {size} texts in a batch. It starts again with half "
                f"as many, and halves them again if need be.",
                stacklevel=3,
            )
        said, size = True, size // 2


def _is_out_of_memory(error: BaseException) -> bool:
    is_known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_known or "DefaultCPUAllocator" in str(error)
