"""Corpora larger than memory: the texts of files or of a dataset, dealt out to shards."""

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from headwise._packages import require
from headwise.corpora.readers import blocks_of, fault_at, json_line, parse_sentence
from headwise.errors import ArgumentError, InputError
from headwise.files import is_unicode, kind_of

__all__ = ["DatasetStream", "FileCorpus", "open_source", "windows"]

_PREFIX = "datasets:"
# A shard of this many bytes keeps a process busy for minutes, and a failure loses no more.
_BYTES_PER_SHARD, _MOST_SHARDS = 2**24, 4096
# A longer line or sentence is refused, so that memory stays bounded.
LONGEST_LINE = 2**28
# The most texts, and the most characters, that are read and tokenized together. Texts of similar
# length among them share a batch.
_TEXTS, _CHARACTERS = 1024, 2**21


def open_source(
    data: str | Path | Sequence[str | Path], column: str = "text"
) -> "FileCorpus | DatasetStream":
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
    streamed = [name for name in names if name.startswith(_PREFIX)]
    if not streamed:
        paths = {path for name in names for path in _matching(name)}
        return FileCorpus(tuple((path, _size(path)) for path in sorted(paths)), column)
    if len(names) > 1:
        raise ArgumentError(
            f"corpus: {streamed[0]} and {len(names) - 1} more. Give one dataset alone, or globs."
        )
    name, _, split = streamed[0].removeprefix(_PREFIX).partition(":")
    return DatasetStream(name, split or "train", column)


def windows(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in groups that fit into memory, in order; those of white space alone are left out."""
    window: list[str] = []
    characters = 0
    for text in filter(str.strip, texts):
        window.append(text)
        characters += len(text)
        if len(window) >= _TEXTS or characters >= _CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


@dataclass(frozen=True)
class FileCorpus:
    """The texts of some files.

    Files are dealt out to the shards in turn. Where there are fewer files than shards, the texts
    are: every process then reads all files, which costs little beside a pass of a model.

    Attributes:
        files: Paths and sizes, in order.
        column: The column of Parquet files and the key of JSON lines that holds the text.
    """

    files: tuple[tuple[str, int], ...]
    column: str = "text"

    def describe(self) -> dict[str, Any]:
        """The files with their sizes, and the column."""
        return {"files": [list(file) for file in self.files], "column": self.column}

    def default_shards(self) -> int:
        """A shard for each 16 MiB, and at most 4096."""
        size = sum(size for _, size in self.files)
        return min(_MOST_SHARDS, 1 + (size - 1) // _BYTES_PER_SHARD) if size else 1

    def texts(self, shard: int, shards: int) -> Iterator[str]:
        """The texts of a shard, in the order of the files.

        Raises:
            InputError: a file cannot be read, has changed in size, or holds something else than
                texts. The error names the place.
        """
        if len(self.files) >= shards:
            return self._read(self.files[shard::shards])
        return islice(self._read(self.files), shard, None, shards)

    def _read(self, files: Sequence[tuple[str, int]]) -> Iterator[str]:
        for path, size in files:
            if _size(path) != size:
                raise InputError(
                    f"corpus: {path} has {_size(path)} bytes, not {size} as when the job began. "
                    f"Restore it, or start a new job."
                )
            yield from _READERS[Path(path).suffix](path, self.column)


def _matching(pattern: str) -> set[str]:
    """The files that a glob matches; the name of a file may hold characters of globs."""
    is_file = Path(pattern).is_file()
    found = [pattern] if is_file else glob.glob(pattern, recursive=True)
    paths = {path for path in found if Path(path).is_file()}
    if not paths:
        advice = "Name existing files."
        if Path(pattern).is_dir():
            advice = f"It is a folder: name its files, such as {pattern}/*.parquet."
        raise InputError(f"corpus: no file matches {pattern!r}. {advice}")
    for path in sorted(paths):
        if Path(path).suffix not in _READERS:
            raise InputError(
                f"corpus: {path} ends in {Path(path).suffix!r}. Name files that end in "
                f"{', '.join(_READERS)}, uncompressed."
            )
        if not is_unicode(path):
            raise InputError(f"corpus: the name of {path!r} is not UTF-8. Rename the file.")
    return paths


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"corpus: {path} cannot be read ({error.strerror}). Name a file that exists.")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1, without white space at their ends."""
    try:
        with Path(path).open("rb") as file:
            kind = kind_of(file.peek(512))  # named where a line turns out not to be text
            for number in count(1):
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                fault = fault_at("corpus", path, number)
                if len(line) > LONGEST_LINE:
                    raise fault(f"more than {LONGEST_LINE:,} bytes. Cut it.")
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
                except UnicodeDecodeError as error:
                    if kind:
                        raise InputError(
                            f"corpus: {path} is {kind}, not UTF-8 text. Name files of plain text."
                        ) from error
                    raise fault(
                        f"not UTF-8 (byte {error.start} is 0x{line[error.start]:02x}). Convert the "
                        f"file, for example with iconv."
                    ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_objects(path: str, column: str) -> Iterator[str]:
    """The text in each JSON line, whatever its other keys hold; null is an empty text."""
    parse = partial(json.loads, parse_int=Decimal)  # integers may be too long for an int
    for number, line in _lines(path):
        if line.strip():
            fault = fault_at("corpus", path, number)
            fields = json_line(line, fault, parse)
            if not isinstance(fields, dict) or column not in fields:
                raise fault(
                    f"{line[:40]!r} is not an object with the key {column!r}. Name another column, "
                    f"or give one object per line."
                )
            yield _text(fields[column], f"{path}, line {number}", column)


def _read_sentences(path: str, column: str) -> Iterator[str]:
    """The sentences of a CoNLL-U file."""
    sentences = (parse_sentence(block, path) for block in blocks_of(_lines(path)))
    return (sentence.text for sentence in sentences if sentence is not None)


def _read_rows(path: str, column: str) -> Iterator[str]:
    """The texts of a column of a Parquet file, a few rows of a row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, column, file.schema_arrow.names)
            for batch in file.iter_batches(256, columns=[column]):
                for text in batch.column(0).to_pylist():
                    yield _text(text, path, column)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"corpus: {path} cannot be read as Parquet ({_reason(error)}). Copy it again."
        ) from error


_READERS: Mapping[str, Callable[[str, str], Iterator[str]]] = {
    ".parquet": _read_rows,
    ".jsonl": _read_objects,
    ".ndjson": _read_objects,
    ".conllu": _read_sentences,
    **dict.fromkeys((".txt", ".text"), lambda path, _: (line for _, line in _lines(path))),
}


def _text(value: Any, where: str, column: str) -> str:
    """A text of a table or an object; a missing one is empty.

    Raises:
        InputError: it is something else, or no Unicode.
    """
    if value is not None and not isinstance(value, str):
        raise InputError(
            f"corpus: {where}: {column!r} is {str(value)[:40]!r}. Name the column with the texts."
        )
    if value and not is_unicode(value):
        raise InputError(f"corpus: {where}: {column!r} holds a lone surrogate. Give valid Unicode.")
    return value or ""


def _check_column(what: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise InputError(
            f"corpus: {what} has no column {column!r}, only {', '.join(names)[:80]}. Name the "
            f"column with the texts."
        )


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True)
class DatasetStream:
    """The texts of one split of a dataset on the hub, or in a local folder."""

    name: str
    split: str = "train"
    column: str = "text"

    @cached_property
    def _opened(self) -> Any:
        datasets = require("datasets", "datasets", "corpus")
        try:
            opened = datasets.load_dataset(self.name, split=self.split, streaming=True)
        except Exception as error:  # the library raises errors of many others
            raise InputError(
                f"corpus: the dataset {self.name!r}, split {self.split!r}, cannot be opened "
                f"({_reason(error)[:160]}). Give datasets:NAME or datasets:NAME:SPLIT."
            ) from error
        if opened.column_names is not None:
            _check_column(f"the dataset {self.name!r}", self.column, opened.column_names)
        return opened

    def describe(self) -> dict[str, Any]:
        """The name, the split, the column and the number of files."""
        parts = self._opened.num_shards
        return {"dataset": self.name, "split": self.split, "column": self.column, "parts": parts}

    def default_shards(self) -> int:
        """A shard for each file."""
        return int(self._opened.num_shards)

    def texts(self, shard: int, shards: int) -> Iterator[str]:
        """The texts of a shard, in the order of the dataset.

        Raises:
            InputError: an example has no text.
        """
        if self._opened.num_shards >= shards:
            examples = self._opened.shard(num_shards=shards, index=shard)
        else:
            examples = islice(self._opened, shard, None, shards)
        for number, example in enumerate(examples):
            where = f"example {number} of shard {shard} of {self.name!r}"
            yield _text(example.get(self.column), where, self.column)
