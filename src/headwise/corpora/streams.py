"""Corpora larger than memory: the texts of files or of a dataset, dealt out to shards."""

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from headwise._display import first_line
from headwise._packages import require
from headwise.corpora._conllu import blocks_of, parse_sentence
from headwise.corpora._source import fault_at, json_line
from headwise.errors import ArgumentError, InputError
from headwise.files import is_unicode, kind_of

__all__ = ["Stream", "open_source", "windows"]

_PREFIX = "datasets:"
# A shard of this many bytes keeps a process busy for minutes, and a failure loses no more.
_BYTES_PER_SHARD, _MOST_SHARDS = 2**24, 4096
# A longer line or sentence is refused, so that memory stays bounded.
LONGEST_LINE = 2**28
# The most texts, and the most characters, that are read and tokenized together. Texts of similar
# length among them share a batch.
_TEXTS, _CHARACTERS = 1024, 2**21


@dataclass(frozen=True)
class Stream:
    """Texts that are dealt out to shards.

    Attributes:
        about: What is read, as JSON: files with their sizes, or the parts of a dataset.
        shards: How many shards suit it.
        texts: The texts of a shard in their order, by its number and the number of shards.
    """

    about: Mapping[str, Any]
    shards: int
    texts: Callable[[int, int], Iterator[str]]


def open_source(data: str | Path | Sequence[str | Path], column: str = "text") -> Stream:
    """The files that match some globs, or a dataset of the Hugging Face hub that is streamed.

    Args:
        data: Globs, of which `**` matches folders at any depth, or `datasets:NAME` with an optional
            `:SPLIT` (`train` without it); NAME may be a local folder.
        column: The column of tables, and the key of JSON lines, that holds the text.
    Raises:
        ArgumentError: `data` is neither, or mixes both.
        InputError: no file matches a glob, a file has an unknown ending, or the dataset cannot be
            opened. `texts` raises it where a file has changed in size or holds something else.
        MissingPackageError: `datasets` is needed and not installed.
    """
    patterns = [data] if isinstance(data, str | Path) else list(data)
    if not patterns or not all(isinstance(pattern, str | Path) for pattern in patterns):
        raise ArgumentError(f"corpus: data={data!r:.80}. Give a glob such as 'data/*.parquet'.")
    names = [str(pattern) for pattern in patterns]
    streamed = [name for name in names if name.startswith(_PREFIX)]
    if streamed and len(names) > 1:
        raise ArgumentError(
            f"corpus: {streamed[0]} and {len(names) - 1} more. Give one dataset alone, or globs."
        )
    if streamed:
        name, _, split = streamed[0].removeprefix(_PREFIX).partition(":")
        return _open_dataset(name, split or "train", column)
    files = [(path, _size(path)) for path in sorted({p for n in names for p in _matching(n)})]
    about = {"files": [list(file) for file in files], "column": column}
    size = sum(size for _, size in files)
    shards = min(_MOST_SHARDS, 1 + (size - 1) // _BYTES_PER_SHARD) if size else 1
    return Stream(about, shards, partial(_texts_of_files, files, column))


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


def _texts_of_files(
    files: Sequence[tuple[str, int]], column: str, shard: int, shards: int
) -> Iterator[str]:
    """Files are dealt out in turn, or the texts of all files where there are fewer files.

    Every process then reads all files, which costs little beside a pass of a model.
    """
    if len(files) < shards:
        yield from islice(_texts_of_files(files, column, 0, 1), shard, None, shards)
        return
    for path, size in files[shard::shards]:
        if _size(path) != size:
            raise InputError(
                f"corpus: {path} has {_size(path)} bytes, not {size} as when the job began. "
                f"Restore it, or start a new job."
            )
        yield from _READERS[Path(path).suffix](path, column)


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


@contextmanager
def _named_failure(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"corpus: {path} cannot be read ({error.strerror}). Name a file that exists."
        ) from error


def _size(path: str) -> int:
    with _named_failure(path):
        return Path(path).stat().st_size


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1, without white space at their ends."""
    with _named_failure(path), Path(path).open("rb") as file:
        kind = kind_of(file.peek(512))  # named where a line turns out not to be text
        for number in count(1):
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                return
            fault = fault_at("corpus", path, number)
            if len(line) > LONGEST_LINE:
                raise fault(f"more than {LONGEST_LINE:,} bytes. Cut it.")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                if kind:
                    raise InputError(
                        f"corpus: {path} is {kind}, not UTF-8 text. Name files of plain text."
                    ) from error
                raise fault(
                    f"not UTF-8 (byte {error.start} is 0x{line[error.start]:02x}). Convert the "
                    f"file, for example with iconv."
                ) from error
            yield number, text.rstrip()


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
            f"corpus: {path} cannot be read as Parquet ({first_line(error)}). Copy it again."
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


def _open_dataset(name: str, split: str, column: str) -> Stream:
    """One split of a dataset on the hub, or in a local folder; a shard for each of its files."""
    datasets = require("datasets", "datasets", "corpus")
    try:
        opened = datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:  # the library raises errors of many others
        raise InputError(
            f"corpus: the dataset {name!r}, split {split!r}, cannot be opened "
            f"({first_line(error)}). Give datasets:NAME or datasets:NAME:SPLIT."
        ) from error
    if opened.column_names is not None:
        _check_column(f"the dataset {name!r}", column, opened.column_names)
    parts = int(opened.num_shards)
    about = {"dataset": name, "split": split, "column": column, "parts": parts}
    return Stream(about, parts, partial(_texts_of_dataset, opened, name, column))


def _texts_of_dataset(
    opened: Any, name: str, column: str, shard: int, shards: int
) -> Iterator[str]:
    if opened.num_shards >= shards:
        examples = opened.shard(num_shards=shards, index=shard)
    else:
        examples = islice(opened, shard, None, shards)
    for number, example in enumerate(examples):
        yield _text(example.get(column), f"example {number} of shard {shard} of {name!r}", column)
