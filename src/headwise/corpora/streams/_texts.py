"""Texts of each kind of file, from a range of its bytes, in memory that does not grow."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from headwise.corpora._text import AnnotatedText
from headwise.corpora.readers import json_line, parse_sentence
from headwise.corpora.streams._records import (
    Record,
    lines_between,
    open_data,
    paragraphs_between,
)
from headwise.errors import InputError
from headwise.files import is_unicode

_WHO = "corpus"
# Rows of a Parquet file that are decoded at once.
_ROWS = 256


@dataclass(frozen=True)
class FileRange:
    """The bytes [start, stop) of a file of some size."""

    path: str
    start: int
    stop: int
    size: int


def read_lines(part: FileRange, column: str) -> Iterator[AnnotatedText]:
    """A text in each line."""
    for record in lines_between(part.path, part.start, part.stop):
        yield AnnotatedText(record.text())


def read_paragraphs(part: FileRange, column: str) -> Iterator[AnnotatedText]:
    """A text in each paragraph."""
    for record in paragraphs_between(part.path, part.start, part.stop):
        yield AnnotatedText(record.text())


def read_objects(part: FileRange, column: str) -> Iterator[AnnotatedText]:
    """The text in each JSON line, whatever its other keys hold; null is an empty text."""
    for record in lines_between(part.path, part.start, part.stop):
        fields = json_line(record.text(), partial(_fault, record), _parse)
        if not isinstance(fields, dict) or column not in fields:
            raise _fault(
                record,
                f"{record.text()[:40]!r} is not an object with the key {column!r}. Name another "
                f"column, or give one object per line.",
            )
        text = fields[column]
        if text is not None and not isinstance(text, str):
            raise _fault(record, f"{column!r} is {str(text)[:40]!r}. Give a string.")
        if text and not is_unicode(text):
            raise _fault(record, f"{column!r} holds a lone surrogate. Give valid Unicode.")
        yield AnnotatedText(text or "")


def read_sentences(part: FileRange, column: str) -> Iterator[AnnotatedText]:
    """The sentences of a CoNLL-U file, with their annotations."""
    for record in paragraphs_between(part.path, part.start, part.stop):
        lines = record.text().split("\n")
        try:
            sentence = parse_sentence(list(enumerate(lines, 1)), part.path)
        except InputError:
            # Lines are counted only now, because that reads the file from its beginning.
            sentence = parse_sentence(list(enumerate(lines, record.line_number())), part.path)
        if sentence is not None:
            yield sentence


def read_rows(part: FileRange, column: str) -> Iterator[AnnotatedText]:
    """The texts of a column of a Parquet file, a few rows of a row group at a time.

    Row `r` of `n` counts as beginning at byte `r · size / n`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_data(part.path) as source, pq.ParquetFile(source) as file:
            _check_column(file, part.path, column)
            yield from _rows(file, part, column)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(
            f"{_WHO}: {part.path} cannot be read as Parquet ({reason}). Copy it again."
        ) from error


def _check_column(file: Any, path: str, column: str) -> None:
    import pyarrow as pa

    schema = file.schema_arrow
    if column not in schema.names:
        raise InputError(
            f"{_WHO}: {path} has no column {column!r}, only {', '.join(schema.names)[:80]}. "
            f"Name the column with the texts."
        )
    kind = schema.field(schema.names.index(column)).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    # In a file without any text, the column has the type null.
    types = pa.types
    kinds = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_kind(kind) for is_kind in kinds):
        raise InputError(f"{_WHO}: the column {column!r} of {path} is {kind}. Name one of texts.")


def _rows(file: Any, part: FileRange, column: str) -> Iterator[AnnotatedText]:
    n_rows = file.metadata.num_rows
    # The first row that begins in the range, and the first behind it.
    first, last = (-(-edge * n_rows // part.size) for edge in (part.start, part.stop))
    row = 0
    for group in range(file.num_row_groups):
        end = row + file.metadata.row_group(group).num_rows
        if first < end and row < last:
            yield from _rows_of_group(file, group, column, (first - row, last - row))
        row = end


def _rows_of_group(
    file: Any, group: int, column: str, rows: tuple[int, int]
) -> Iterator[AnnotatedText]:
    before = 0
    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[column]):
        first, last = max(0, rows[0] - before), min(len(batch), rows[1] - before)
        if first < last:
            for text in batch.column(0).slice(first, last - first).to_pylist():
                yield AnnotatedText(text or "")
        before += len(batch)
        if before >= rows[1]:
            return


# Integers may be too long for an int.
_parse = partial(json.loads, parse_int=Decimal)

READERS: Mapping[str, Callable[[FileRange, str], Iterator[AnnotatedText]]] = {
    "parquet": read_rows,
    "jsonl": read_objects,
    "conllu": read_sentences,
    "lines": read_lines,
    "paragraphs": read_paragraphs,
}


def _fault(record: Record, problem: str) -> InputError:
    return InputError(f"{_WHO}: {record.path}, line {record.line_number()}: {problem}")
