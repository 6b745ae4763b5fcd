"""What a long scoring found so far, in a file, so that an interrupted one goes on."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float64
from torch import Tensor

from headwise._tensors import read_with_metadata, write_tensors
from headwise.errors import InputError
from headwise.files import write_beside
from headwise.scoring._task_score import Inputs

# What a kill may cost, in seconds.
_SECONDS = 5.0


class ScoringCheckpoint:
    """Tables of what was found, by name; NaN stands where nothing was found yet.

    Args:
        path: The file that they are kept in; None keeps them in memory only.
        about: What they are of. A file that is of something else is refused.
    Raises:
        InputError: there is a file at `path` that is no such one, or is of something else.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, str] | None = None) -> None:
        self._path, self._about = path, {"headwise_unfinished": "1", **(about or {})}
        self._tables: dict[str, Tensor] = {}
        self._written = time.monotonic()
        if path is not None and path.exists():
            self._tables = _read(path, self._about)

    def table(self, name: str, texts: int, heads: int) -> Float64[Tensor, "texts heads"]:
        """The table of this name, to be filled in place.

        Raises:
            InputError: the file has a table of this name with another shape or dtype, or with
                infinite values.
        """
        empty = torch.full((texts, heads), torch.nan, dtype=torch.float64)
        table = self._tables.setdefault(name, empty)
        if table.shape != empty.shape or table.dtype != empty.dtype:
            self._refuse(f"{name!r} is {_kind(table)}, not {_kind(empty)}")
        if table.isinf().any():
            self._refuse(f"{name!r} holds {table[table.isinf()][0].item()}")
        return table

    def _refuse(self, why: str) -> NoReturn:
        raise InputError(
            f"importance: the unfinished scores in {self._path} are broken ({why}). Name another "
            f"file, or delete it to begin anew."
        )

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Write what was filled when the block ends, also when it is interrupted.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            yield
        finally:
            self._write()

    def filled(self) -> None:
        """Tell that a part of a table was filled; it is written every few seconds."""
        if time.monotonic() - self._written > _SECONDS:
            self._write()

    def finish(self) -> None:
        """Take the file away: all is found."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        known = any(not table.isnan().all() for table in self._tables.values())
        if self._path is not None and known:
            with write_beside(self._path) as beside:
                write_tensors(self._tables, beside, self._about)
            self._written = time.monotonic()


def digest_of(batches: Sequence[Inputs]) -> str:
    """A hash of what a model reads: equal for equal batches only."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name, value in sorted(batch.items()):
            digest.update(f"{name}{_kind(value)}".encode())
            if isinstance(value, Tensor):
                whole = value.detach().cpu().contiguous().flatten()
                digest.update(whole.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)}{value.dtype}" if isinstance(value, Tensor) else repr(value)


def _read(path: Path, about: Mapping[str, str]) -> dict[str, Tensor]:
    problem, advice = "holds no unfinished scores", "Name another file, or delete it to begin anew."
    tables, found = read_with_metadata(path, "importance", problem, advice)
    for name, wanted in about.items():
        if found.get(name) != wanted:
            raise InputError(
                f"importance: the unfinished scores in {path} are of {name}={found.get(name)!r}, "
                f"not {wanted!r}. Name another file, or delete it to begin anew."
            )
    return tables
