"""A dataset of the Hugging Face hub, streamed and cut by its files."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headwise._display import counted
from headwise._packages import require
from headwise.corpora._text import AnnotatedText
from headwise.errors import ArgumentError, InputError

PREFIX = "datasets:"


@dataclass(frozen=True)
class DatasetStream:
    """The texts of one split of a dataset.

    Attributes:
        name: A name on the hub, or a local folder.
        column: The column that holds the text.
    """

    name: str
    split: str = "train"
    column: str = "text"

    @classmethod
    def of(cls, name: str, column: str) -> "DatasetStream":
        """The stream that `datasets:NAME` or `datasets:NAME:SPLIT` names.

        Raises:
            InputError: the dataset cannot be opened, or has no such column.
            MissingPackageError: `datasets` is not installed.
        """
        dataset, _, split = name.removeprefix(PREFIX).partition(":")
        stream = cls(dataset, split or "train", column)
        columns = stream._opened.column_names
        if columns is not None and column not in columns:
            raise InputError(
                f"corpus: the dataset {dataset!r} has no column {column!r}, only "
                f"{', '.join(columns)[:80]}. Name the column with the texts."
            )
        return stream

    @cached_property
    def _opened(self) -> Any:
        datasets = require("datasets", "datasets", "corpus")
        try:
            return datasets.load_dataset(self.name, split=self.split, streaming=True)
        except Exception as error:  # the library raises errors of many others
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"corpus: the dataset {self.name!r}, split {self.split!r}, cannot be opened "
                f"({reason[:160]}). Give datasets:NAME or datasets:NAME:SPLIT."
            ) from error

    def describe(self) -> dict[str, Any]:
        """The name, the split, the column and the number of files."""
        return {
            "dataset": self.name,
            "split": self.split,
            "column": self.column,
            "parts": self._opened.num_shards,
        }

    def check_shards(self, shards: int) -> None:
        """Refuse more shards than the dataset has files, as a stream is cut by its files.

        Raises:
            ArgumentError: there are more.
        """
        if shards > self._opened.num_shards:
            raise ArgumentError(
                f"corpus: shards={shards}, but the dataset {self.name!r} has only "
                f"{counted(self._opened.num_shards, 'part')}. Give no more shards than that."
            )

    def default_shards(self) -> int:
        """A shard for each file."""
        return int(self._opened.num_shards)

    def shard(self, index: int, shards: int) -> list[Any]:
        """The number of the shard, and of all."""
        return [[self.name, index, shards]]

    def texts(self, index: int, shards: int) -> Iterator[AnnotatedText]:
        """The texts of a shard, in the order of the dataset.

        Raises:
            InputError: an example has no text.
        """
        part = self._opened.shard(num_shards=shards, index=index)
        for number, example in enumerate(part):
            text = example.get(self.column)
            if text is not None and not isinstance(text, str):
                raise InputError(
                    f"corpus: example {number} of shard {index} of {self.name!r} has "
                    f"{self.column}={str(text)[:40]!r}. Name the column with the texts."
                )
            yield AnnotatedText(text or "")
