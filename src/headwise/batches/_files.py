"""`observe_files`: the statistics of a corpus of files, on Ray where it is installed."""

import glob
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from headwise._display import first_line
from headwise._extras import require
from headwise.batches._batches import BatchObserver
from headwise.errors import InputError
from headwise.tables import HeadTable

_ARROW = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".csv": "csv"}
_LINES = (".txt", ".text")
_ROWS = 256  # in a batch


def observe_files(
    patterns: Sequence[str],
    *,
    column: str = "text",
    address: str | None = None,
    workers: int | None = None,
    **options: Any,
) -> HeadTable:
    """The statistics of every head on the texts of some files.

    Args:
        patterns: Globs of .parquet, .jsonl, .csv or .txt files; a line of the last is a text.
        column: The column, or the key of JSON lines, that holds the texts.
        address: A Ray cluster. None is a Ray of this machine or, without Ray, this process.
        workers: How many processes of Ray open the model. None is one for each CPU.
        options: Further arguments of `BatchObserver`.
    Raises:
        InputError: no file matches, or a file or a text cannot be read.
        MissingPackageError: `address` is given, and Ray is not installed.
    """
    paths = sorted({path for pattern in patterns for path in _matching(pattern)})
    if address is None and find_spec("ray") is None:
        observer = BatchObserver(column=column, **options)
        rows = chain.from_iterable(read_rows(path, column) for path in paths)
        shown = iter(tqdm(rows, desc="Observing", unit=" texts"))
        batches = iter(lambda: [*islice(shown, _ROWS)], [])
        return HeadTable.sum(
            observer({name: [row[name] for row in batch] for name in batch[0]}) for batch in batches
        )
    ray = require("ray", "ray", "observe")
    data = require("ray.data", "ray", "observe")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(address or "local", include_dashboard=False)
    try:
        cpus = int(ray.cluster_resources()["CPU"])
        tables = (
            data.from_items([{"path": path} for path in paths])
            # A reader waits for the models most of the time.
            .flat_map(lambda row: read_rows(row["path"], column), num_cpus=0.1)
            .repartition(target_num_rows_per_block=_ROWS)
            .map_batches(
                BatchObserver,
                fn_constructor_kwargs={"column": column, **options},
                batch_size=_ROWS,
                compute=data.ActorPoolStrategy(size=workers or cpus),
                num_cpus=0.5,
            )
        )
        return HeadTable.sum(tables)
    finally:
        if is_ours:
            ray.shutdown()


def read_rows(path: str, column: str) -> Iterator[dict[str, Any]]:
    """The texts of a file, with their path and their row, from 1."""
    try:
        for row, text in enumerate(_texts(path, column), 1):
            yield {column: text, "path": path, "row": row}
    except (OSError, ValueError) as error:  # pyarrow's errors and those of UTF-8 are ValueErrors
        raise InputError(
            f"observe: {path} cannot be read ({first_line(error)}). Give a column of texts in a "
            f"{', '.join(_ARROW)} file, or lines in a {', '.join(_LINES)} file."
        ) from error


def _texts(path: str, column: str) -> Iterator[Any]:
    if Path(path).suffix in _LINES:
        with Path(path).open(encoding="utf-8") as file:
            yield from (line.rstrip("\r\n") for line in file)
        return
    from pyarrow import dataset

    source = dataset.dataset(path, format=_ARROW[Path(path).suffix])
    if column not in source.schema.names:
        raise ValueError(f"it has no column {column!r}, only {', '.join(source.schema.names)}")
    for batch in source.to_batches(columns=[column], batch_size=_ROWS):
        yield from batch.column(0).to_pylist()


def _matching(pattern: str) -> list[str]:
    paths = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
    wrong = [path for path in paths if Path(path).suffix not in (*_ARROW, *_LINES)]
    if wrong or not paths:
        found = f"matches {wrong[0]}, of an unknown format" if wrong else "matches no file"
        raise InputError(
            f"observe: {pattern!r} {found}. Name files that end in "
            f"{', '.join((*_ARROW, *_LINES))}, such as 'data/*.parquet'."
        )
    return paths
