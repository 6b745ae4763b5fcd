"""The scores of a long scoring so far, in a file from which an interrupted one resumes."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float64
from torch import Tensor

from headwise._checkpoint import Checkpoint, kind_of_tensor
from headwise.scoring._loss import Inputs


class ScoringCheckpoint:
    """Tables of scores by name; NaN marks a score that is not computed yet.

    Args:
        path: The file that holds the tables. None keeps them in memory only.
        about: The model, texts and method of the scores. A file about others is refused.
    Raises:
        InputError: the file at `path` is not such a checkpoint, or is about something else.
    """

    def __init__(self, path: Path | None = None, about: Mapping[str, str] | None = None) -> None:
        about = {"headwise_unfinished": "1", **(about or {})}
        self._file = Checkpoint(path, about, "importance", "unfinished scores are")
        self._tables: dict[str, Tensor] = self._file.read() or {}

    def table(self, name: str, texts: int, heads: int) -> Float64[Tensor, "texts heads"]:
        """Return the table of this name, which the caller fills in place.

        Raises:
            InputError: the table in the file has another shape or dtype, or infinite values.
        """
        empty = torch.full((texts, heads), torch.nan, dtype=torch.float64)
        table = self._tables.setdefault(name, empty)
        has, needs = kind_of_tensor(table), kind_of_tensor(empty)
        if has != needs:
            self._file.refuse(f"{name!r} is {has}, not {needs}")
        if table.isinf().any():
            self._file.refuse(f"{name!r} holds {table[table.isinf()][0].item()}")
        return table

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
        if self._file.is_due:
            self._write()

    def _write(self) -> None:
        if any(not table.isnan().all() for table in self._tables.values()):
            self._file.write(self._tables)


def digest_of(batches: Sequence[Inputs]) -> str:
    """Return a hash of the batches, equal only for equal batches."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        for name, value in sorted(batch.items()):
            is_tensor = isinstance(value, Tensor)
            kind = f"{tuple(value.shape)}{value.dtype}" if is_tensor else repr(value)
            digest.update(f"{name}{kind}".encode())
            if is_tensor:
                flat = value.detach().cpu().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
