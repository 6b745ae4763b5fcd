"""Files as one corpus, cut into shards of equally many bytes.

The bytes of all files form one line, in the order of the files, and shard `i` of `n` is its i-th
n-th. A text belongs to the shard in which it begins. Rows of a Parquet file count as equally long.
"""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from headwise.corpora._text import AnnotatedText
from headwise.corpora.streams._records import has_paragraphs, size_of
from headwise.corpora.streams._texts import READERS, FileRange
from headwise.errors import ArgumentError, InputError
from headwise.files import is_unicode

# A shard of this many bytes keeps a worker busy for minutes, and a failure loses no more.
_BYTES_PER_SHARD, _MOST_SHARDS = 2**24, 4096
_KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".conllu": "conllu",
    ".txt": "text",
    ".text": "text",
}


@dataclass(frozen=True)
class DataFile:
    """A file of a corpus.

    Attributes:
        size: Its size in bytes.
        kind: "parquet" (a text in each row), "jsonl", "conllu" (sentences), or "text": paragraphs,
            or lines if its first MiB has no blank line between two that are not.
    """

    path: str
    size: int
    kind: str


def find_files(patterns: Sequence[str]) -> tuple[DataFile, ...]:
    """The files that match some globs, sorted by path.

    Raises:
        InputError: no file matches a glob, or a file has an unknown ending.
    """
    paths: set[str] = set()
    for pattern in patterns:
        matching = _matching(pattern)
        if not matching:
            advice = "Name existing files."
            if Path(pattern).is_dir():
                advice = f"It is a folder: name its files, such as {pattern}/*.parquet."
            raise InputError(f"corpus: no file matches {pattern!r}. {advice}")
        paths |= matching
    return tuple(_data_file(path) for path in sorted(paths))


def _matching(pattern: str) -> set[str]:
    """The files that a glob matches; the name of a file may hold characters of globs."""
    if Path(pattern).is_file():
        return {pattern}
    return {path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()}


def _data_file(path: str) -> DataFile:
    ending = Path(path).suffix
    if ending not in _KINDS:
        raise InputError(
            f"corpus: {path} ends in {ending!r}. Name files that end in {', '.join(_KINDS)}, "
            f"uncompressed."
        )
    if not is_unicode(path):
        raise InputError(f"corpus: the name of {path!r} is not UTF-8. Rename the file.")
    size = size_of(path)
    if ending == ".parquet" and not size:
        raise InputError(f"corpus: {path} is empty, and no Parquet file is. Copy it again.")
    return DataFile(path, size, _KINDS[ending])


@dataclass(frozen=True)
class FileCorpus:
    """The texts of some files.

    Attributes:
        column: The column of Parquet files and the key of JSON lines that holds the text.
    """

    files: tuple[DataFile, ...]
    column: str = "text"

    def describe(self) -> dict[str, Any]:
        """The files with their sizes, and the column."""
        return {"files": [[file.path, file.size] for file in self.files], "column": self.column}

    def check_shards(self, shards: int) -> None:
        """Accept any number of shards; some may be empty.

        Raises:
            ArgumentError: there are more shards than bytes.
        """
        if shards > max(1, self.size):
            raise ArgumentError(
                f"corpus: shards={shards} for {self.size} bytes of text. Give fewer shards."
            )

    def default_shards(self) -> int:
        """A shard for each 16 MiB, and at most 4096."""
        return min(_MOST_SHARDS, 1 + (self.size - 1) // _BYTES_PER_SHARD) if self.size else 1

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    def shard(self, index: int, shards: int) -> list[Any]:
        """The path, first byte and end of each file's part in a shard."""
        return [[part.path, part.start, part.stop] for _, part in self._parts(index, shards)]

    def texts(self, index: int, shards: int) -> Iterator[AnnotatedText]:
        """The texts of a shard, in the order of the files.

        Raises:
            InputError: a file cannot be read, has changed in size, or holds something else than
                texts. The error names the place.
        """
        for file, part in self._parts(index, shards):
            if size_of(file.path) != file.size:
                raise InputError(
                    f"corpus: {file.path} has {size_of(file.path)} bytes, not {file.size} as "
                    f"when the job began. Restore it, or start a new job."
                )
            kind = file.kind
            if kind == "text":
                kind = "paragraphs" if has_paragraphs(file.path) else "lines"
            yield from READERS[kind](part, self.column)

    def _parts(self, index: int, shards: int) -> Iterable[tuple[DataFile, FileRange]]:
        first, last = (self.size * edge // shards for edge in (index, index + 1))
        ends = accumulate(file.size for file in self.files)
        for file, end in zip(self.files, ends, strict=True):
            begin = end - file.size
            start, stop = max(first, begin) - begin, min(last, end) - begin
            if start < stop:
                yield file, FileRange(file.path, start, stop, file.size)
