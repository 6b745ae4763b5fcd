"""The file of unfinished work, from which an interrupted run resumes."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from headwise._tensors import read_with_metadata, write_tensors
from headwise.errors import InputError
from headwise.files import write_beside

# The least seconds between two writes, which is the most work that a killed process loses, and how
# much longer a run computes than it writes.
_SECONDS, _COMPUTE_PER_WRITE = 5.0, 20.0
_ADVICE = "Name another file, or delete it to start again."


class Checkpoint:
    """Tensors by name, with what they are about.

    Args:
        path: The file. None keeps nothing.
        about: The models, texts and settings of the work. A file about others is refused.
        function: The function that works, for errors.
        work: What is unfinished, such as `scores are`.
    """

    def __init__(
        self, path: Path | None, about: Mapping[str, str], function: str, work: str
    ) -> None:
        self._path, self._about, self._function = path, about, function
        self._work, _, self._verb = work.partition(" ")
        self._due = time.monotonic() + _SECONDS

    @property
    def is_due(self) -> bool:
        """Whether the last write was some time ago."""
        return time.monotonic() > self._due

    def read(self) -> dict[str, Tensor] | None:
        """The stored tensors; None without a file.

        Raises:
            InputError: the file is no such checkpoint, or is about something else.
        """
        if self._path is None or not self._path.exists():
            return None
        problem = f"holds no unfinished {self._work}"
        tensors, about = read_with_metadata(self._path, self._function, problem, _ADVICE)
        for name, value in self._about.items():
            if about.get(name) != value:
                raise InputError(
                    f"{self._function}: the unfinished {self._work} in {self._path} {self._verb} "
                    f"of {name}={about.get(name)!r}, not {value!r}. {_ADVICE}"
                )
        return tensors

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors; the file is whole at any time.

        Raises:
            OutputError: the file cannot be written.
        """
        if self._path is None:
            return
        started = time.monotonic()
        with write_beside(self._path) as beside:
            write_tensors(tensors, beside, self._about)
        now = time.monotonic()
        self._due = now + max(_SECONDS, _COMPUTE_PER_WRITE * (now - started))

    def refuse(self, reason: str) -> NoReturn:
        """Refuse a file whose tensors do not fit.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self._function}: the unfinished {self._work} in {self._path} {self._verb} broken "
            f"({reason}). {_ADVICE}"
        )


def kind_of_tensor(tensor: Tensor) -> str:
    """The shape and the dtype of a tensor, for errors."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
