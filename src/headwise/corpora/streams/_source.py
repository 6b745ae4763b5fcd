"""What a corpus job reads: files or a dataset, described as JSON and read shard by shard."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headwise.corpora._text import AnnotatedText
from headwise.corpora.streams._datasets import PREFIX, DatasetStream
from headwise.corpora.streams._file_corpus import FileCorpus, find_files
from headwise.errors import ArgumentError


@runtime_checkable
class CorpusSource(Protocol):
    """Texts in a fixed order that can be cut into shards."""

    def describe(self) -> dict[str, Any]:
        """What the source is, as JSON: equal for equal sources."""

    def check_shards(self, shards: int) -> None:
        """Refuse a number of shards that the source cannot be cut into."""

    def default_shards(self) -> int:
        """The number of shards if none is named."""

    def shard(self, index: int, shards: int) -> list[Any]:
        """Where the texts of a shard are, as JSON."""

    def texts(self, index: int, shards: int) -> Iterator[AnnotatedText]:
        """The texts of a shard, in order; texts of white space alone are empty texts."""


def open_source(data: str | Path | Sequence[str | Path], column: str = "text") -> CorpusSource:
    """The files that match some globs, or a dataset of the Hugging Face hub that is streamed.

    Args:
        data: One glob or several, of .parquet, .jsonl, .txt or .conllu files; `**` matches
            folders at any depth. Or `datasets:NAME` with an optional `:SPLIT` (`train` without
            it); NAME may be a local folder.
        column: The column of Parquet files and datasets, and the key of JSON lines, that holds
            the text.
    Raises:
        ArgumentError: `data` is neither, or mixes both.
        InputError: no file matches a glob, or a file has an unknown ending.
        MissingPackageError: `datasets` is needed and not installed.
    """
    patterns = [data] if isinstance(data, str | Path) else list(data)
    if not patterns or not all(isinstance(pattern, str | Path) for pattern in patterns):
        raise ArgumentError(f"corpus: data={data!r:.80}. Give a glob such as 'data/*.parquet'.")
    names = [str(pattern) for pattern in patterns]
    streamed = [name for name in names if name.startswith(PREFIX)]
    if not streamed:
        return FileCorpus(find_files(names), column)
    if len(names) > 1:
        raise ArgumentError(
            f"corpus: {streamed[0]} and {len(names) - 1} more. Give one dataset alone, or globs."
        )
    return DatasetStream.of(streamed[0], column)
