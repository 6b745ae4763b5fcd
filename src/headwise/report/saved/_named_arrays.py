"""Arrays by name, as a safetensors file holds them: their sizes are checked when they are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headwise._tensors import read_arrays, write_arrays


class NamedArrays:
    """The arrays of a file. One of another dtype or shape than expected is an error."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._arrays = dict(arrays or {})

    @classmethod
    def read(cls, path: Path) -> "NamedArrays":
        """The arrays of a safetensors file.

        Raises:
            InputError: the file cannot be read.
            TypeError: NumPy has no dtype for a tensor.
        """
        return cls(read_arrays(path))

    def write(self, path: Path) -> None:
        """Write the arrays as safetensors.

        Raises:
            OutputError: they cannot be written.
        """
        write_arrays(self._arrays, path)

    def put(self, name: str, array: Any, dtype: type = np.float64) -> None:
        """Add a copy of an array under a new name."""
        self._arrays[name] = np.array(array, dtype=dtype, order="C")

    def get(self, name: str, *shape: int | None, dtype: type = np.float64) -> np.ndarray:
        """The array of this name.

        Args:
            shape: Its sizes; None is any size.
        Raises:
            KeyError: there is none.
            ValueError: it has another dtype or shape.
        """
        array = self._arrays[name]
        fits = len(array.shape) == len(shape) and all(
            size is None or size == actual for size, actual in zip(shape, array.shape, strict=True)
        )
        if not fits or array.dtype != dtype:
            expected = tuple("any" if size is None else size for size in shape)
            raise ValueError(
                f"{name} is {array.dtype} of {array.shape}, not {np.dtype(dtype)} of {expected}"
            )
        return array

    def __contains__(self, name: str) -> bool:
        return name in self._arrays
