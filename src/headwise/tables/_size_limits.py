"""Limits on the size of a table relative to its file, against decompression bombs.

A few hundred bytes of Parquet can hold billions of equal values, and a few kilobytes of JSON or CSV
can describe a table with as many columns as rows, nearly all of it empty.
"""

import json
from pathlib import Path

import pyarrow as pa

from headwise.errors import InputError

# Equal values take almost no space: a file may hold this many values, and this many more per byte.
_SPARE_VALUES, _VALUES_PER_BYTE = 2**22, 16
# The same for uncompressed bytes.
_SPARE_BYTES, _BYTES_PER_BYTE = 2**26, 128
# A record with a key of its own takes at least this many bytes of JSON, and a row of CSV two.
_BYTES_PER_RECORD, _BYTES_PER_ROW = 8, 2
_BATCH = 2**16


def check_table_size(path: Path) -> None:
    """Refuse a Parquet, CSV or JSON file that describes a far larger table than its size allows.

    A file that cannot be parsed passes: the reader reports what is wrong with it.

    Raises:
        InputError: the table exceeds the limit.
    """
    check = {".parquet": _check_parquet, ".csv": _check_csv, ".json": _check_json}
    try:
        check[path.suffix](path)
    except InputError:
        raise
    except (ValueError, OSError, LookupError, TypeError, RuntimeError, pa.ArrowException):
        return  # pyarrow and json raise any of these


def _check_parquet(path: Path) -> None:
    """Check the counts in the file's metadata, and the texts that rows repeat."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        about = file.metadata
        rows, columns = about.num_rows, about.num_columns
        groups = [about.row_group(index) for index in range(about.num_row_groups)]
        _check_values(path, rows * columns, rows, columns)
        _check_bytes(path, sum(group.total_byte_size for group in groups))
        # pyarrow ends the process if it is asked for a damaged column chunk. A scan, which keeps
        # one batch of values, raises an exception for those.
        file.scan_contents(batch_size=_BATCH)
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        values = max(sum(chunk.num_values for chunk in chunks), rows * columns)
        _check_values(path, values, rows, columns)
        _check_bytes(path, sum(chunk.total_uncompressed_size for chunk in chunks))
        texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}
    _check_bytes(path, sum(_text_bytes(path, name) for name in sorted(texts)))


def _text_bytes(path: Path, name: str) -> int:
    """The bytes of a column's texts: one long text may be repeated in every row."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    total = 0
    with pq.ParquetFile(path, read_dictionary=[name]) as file:
        for batch in file.iter_batches(columns=[name]):
            column = batch.column(0)
            if hasattr(column, "dictionary"):  # a column of lists has none
                lengths = pc.binary_length(column.dictionary).take(column.indices)
                total += pc.sum(lengths).as_py() or 0
    return total


def _check_csv(path: Path) -> None:
    if not _is_small(path, _BYTES_PER_ROW):
        with path.open(encoding="utf-8") as lines:
            next(lines, "")  # the metadata
            columns = next(lines, "").count(",") + 1
            rows = sum(1 for _ in lines)
        _check_values(path, rows * columns, rows, columns)


def _check_json(path: Path) -> None:
    if not _is_small(path, _BYTES_PER_RECORD):
        records = json.loads(path.read_text("utf-8"))["heads"]
        names = {name for record in records for name in record}
        _check_values(path, len(records) * len(names), len(records), len(names))


def _is_small(path: Path, bytes_per_row: int) -> bool:
    """Whether the table stays small even with as many columns as rows."""
    return (path.stat().st_size // bytes_per_row) ** 2 <= _SPARE_VALUES


def _check_values(path: Path, values: int, rows: int, columns: int) -> None:
    described = f"{rows:,} rows of {columns:,} columns, {values:,} values in all"
    _check(path, values, _SPARE_VALUES, _VALUES_PER_BYTE, described)


def _check_bytes(path: Path, n_bytes: int) -> None:
    _check(path, n_bytes, _SPARE_BYTES, _BYTES_PER_BYTE, f"{n_bytes:,} uncompressed bytes")


def _check(path: Path, amount: int, spare: int, per_byte: int, described: str) -> None:
    size = path.stat().st_size
    if amount > (most := spare + per_byte * size):
        raise InputError(
            f"table file: {path} has {size:,} bytes and describes {described}; up to {most:,} "
            f"are read. Save it again."
        )
