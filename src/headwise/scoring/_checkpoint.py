"""The checkpoint file of a long scoring, from which an interrupted one resumes."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Float64
from torch import Tensor

from headwise._tensors import check_metadata, read_with_metadata, write_tensors
from headwise.errors import InputError
from headwise.files import write_beside
from headwise.scoring._task_score import Inputs

# Seconds between two writes: the most work that a killed process loses.
_SECONDS = 5.0


class ScoringCheckpoint:
    """Tables of scores by name; NaN marks a score that is not computed yet.

    Args:
        path: The file that holds the tables. None keeps them in memory only.
        about: The model, texts and method of the scores. A file about others is refused.
    Raises:
        InputError: the file at `path` is not such a checkpoint, or is about something else.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, str] | None = None) -> None:
        self._path, self._about = path, {"headwise_unfinished": "1", **(about or {})}
        self._tables: dict[str, Tensor] = {}
        self._written = time.monotonic()
        if path is not None and path.exists():
            self._tables = _read(path, self._about)

    def table(self, name: str, texts: int, heads: int) -> Float64[Tensor, "texts heads"]:
        """Return the table of this name, which the caller fills in place.

        Raises:
            InputError: the table in the file has another shape or dtype, or infinite values.
        """
        empty = torch.full((texts, heads), torch.nan, dtype=torch.float64)
        table = self._tables.setdefault(name, empty)
        if table.shape != empty.shape or table.dtype != empty.dtype:
            self._refuse(f"{name!r} is {_kind(table)}, not {_kind(empty)}")
        if table.isinf().any():
            self._refuse(f"{name!r} holds {table[table.isinf()][0].item()}")
        return table

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(
            f"importance: the unfinished scores in {self._path} are broken ({reason}). Name "
            f"another file, or delete it to start again."
        )

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Write the tables when the block ends, also after an interrupt.

        Raises:
            OutputError: the file cannot be written.
        """
        try:
            yield
        finally:
            self._write()

    def save_if_due(self) -> None:
        """Write the tables if the last write was some seconds ago."""
        if time.monotonic() - self._written > _SECONDS:
            self._write()

    def _write(self) -> None:
        any_scores = any(not table.isnan().all() for table in self._tables.values())
        if self._path is not None and any_scores:
            with write_beside(self._path) as beside:
                write_tensors(self._tables, beside, self._about)
            self._written = time.monotonic()


def digest_of(batches: Sequence[Inputs]) -> str:
    """Return a hash of the batches, equal only for equal batches."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name, value in sorted(batch.items()):
            digest.update(f"{name}{_kind(value)}".encode())
            if isinstance(value, Tensor):
                flat = value.detach().cpu().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)}{value.dtype}" if isinstance(value, Tensor) else repr(value)


def _read(path: Path, about: Mapping[str, str]) -> dict[str, Tensor]:
    advice = "Name another file, or delete it to start again."
    tables, metadata = read_with_metadata(path, "importance", "holds no unfinished scores", advice)
    says = f"importance: the unfinished scores in {path} are of"
    check_metadata(metadata, about, says, advice)
    return tables
