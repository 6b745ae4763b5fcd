"""Reads and writes a frame with its metadata as Parquet, CSV or JSON, by the file's ending."""

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
from jaxtyping import Float64, Int64

from headwise.errors import ArgumentError, InputError, OutputError
from headwise.files import as_path, build_from, decode, kind_of, parse_json, write_beside
from headwise.tables._heads import Head, address_columns

Table = TypeVar("Table", bound="TableFile")

# What a file holds, by the metadata key of its format version.
_KINDS = {
    "headwise": "a table of statistics (HeadTable)",
    "headwise_scores": "the importance of heads (Scores)",
    "headwise_roles": "roles of heads (Roles)",
    "headwise_effects": "effects of heads (HeadEffects)",
    "headwise_removal": "an effect of heads removed together (Removal)",
    "headwise_comparison": "a comparison of two models (Comparison)",
}

ENDINGS = (".parquet", ".csv", ".json")
# The first line of a CSV holds the metadata.
_COMMENT = "# "
# The key of `DataFrame.attrs` in the metadata of a Parquet file.
_ATTRIBUTES = b"PANDAS_ATTRS"
# The key in a CSV's metadata that names the columns with lists.
_LISTS = "lists"
_BATCH = 2**16  # values of Parquet that a scan keeps


class TableFile:
    """What saves itself as a table with metadata, and loads itself again.

    A subclass names its key among the metadata with the version of its format, says what a file of
    it holds, and builds itself from that.
    """

    _schema: ClassVar[tuple[str, int]]

    def save(self, path: str | Path) -> Path:
        """Write all of it to a file; the ending decides the format: .parquet, .csv or .json.

        A .csv begins with a comment line; read it with `pd.read_csv(path, comment="#")`.

        Raises:
            ArgumentError: the path has another ending.
            OutputError: the file cannot be written. No partial file is left behind.
        """
        frame, about = self._content()
        key, version = self._schema
        target = as_path(f"{type(self).__name__}.save", path)
        return write_table_file(frame, {key: version, **about}, target)

    @classmethod
    def load(cls: type[Table], path: str | Path) -> Table:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, or holds something else, or another version of it.
        """
        kind = cls.__name__
        frame, about = read_table_file(as_path(f"{kind}.load", path))
        return cls._checked(frame, about, f"{kind}.load: {path}")

    def to_bytes(self) -> bytes:
        """All of it as an Arrow stream, which a cell of a table of bytes can hold."""
        frame, about = self._content()
        key, version = self._schema
        metadata: dict[Any, Any] = {_ATTRIBUTES: json.dumps({key: version, **about})}
        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls: type[Table], content: bytes) -> Table:
        """Read what `to_bytes` wrote.

        Raises:
            InputError: the bytes hold something else, or another version of it.
        """
        where = f"{cls.__name__}.from_bytes: the content of {len(content)} bytes"
        try:
            table = pa.ipc.open_stream(content).read_all()
            table.validate(full=True)
            about = _described(parse_json((table.schema.metadata or {})[_ATTRIBUTES].decode()))
            frame = table.to_pandas(ignore_metadata=True)
        except (ValueError, OSError, LookupError, TypeError) as error:  # Arrow's among them
            raise InputError(f"{where} is no table ({error}). Give what to_bytes made.") from error
        return cls._checked(frame, about, where)

    @classmethod
    def sum(cls: type[Table], rows: Any) -> Table:
        """Add up tables, in any order.

        Args:
            rows: The rows that `BatchObserver` or `BatchImportance` made: a dataset of Ray or of
                datasets, a frame, an Arrow table, or what Spark's `collect` returns. Or tables.
        Raises:
            ArgumentError: the rows have no column `table`, or hold no table, or tables that do
                not add up.
            InputError: a row does not hold the bytes of a table.
        """
        total: Any = None
        skipped = 0
        for row in _rows(rows):
            table, refused = (row, 0) if isinstance(row, cls) else cls._of_row(row)
            skipped += refused
            if table is not None:
                total = table if total is None else total + table
        if total is None:
            raise ArgumentError(
                f"{cls.__name__}.sum: no row holds a table ({skipped} texts were skipped). Give "
                f"texts with words."
            )
        return replace(total, skipped=total.skipped + skipped) if skipped else total

    @classmethod
    def _of_row(cls: type[Table], row: Any) -> tuple[Table | None, int]:
        """The table in a row, None if no text of its batch has a token, and its skipped texts."""
        try:
            # What the call of a BatchObserver returns is columns of one row each.
            (content, skipped) = (
                cell[0] if isinstance(cell, list) else cell
                for cell in (row["table"], row["skipped"])
            )
            skipped = int(skipped)
        except (LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{cls.__name__}.sum: a row is {str(row)[:60]!r}. Give rows with the columns table "
                f"and skipped, or tables."
            ) from error
        return cls.from_bytes(content) if content else None, skipped

    @classmethod
    def _checked(cls: type[Table], frame: pd.DataFrame, about: dict[str, Any], where: str) -> Table:
        name, version = cls._schema
        content = next((x for key, x in _KINDS.items() if key in about and key != name), None)
        if name not in about and content is not None:
            raise InputError(
                f"{where} holds {content}, not {_KINDS[name]}. Give a file that "
                f"{cls.__name__}.save wrote."
            )
        if about.get(name) != version:
            raise InputError(
                f"{where} has schema {about.get(name)!r}, not {version}. "
                f"Give a file that {cls.__name__}.save of this version of headwise wrote."
            )
        problem = f"{where} is incomplete or damaged"
        return build_from(lambda: cls._built(frame, about), problem, "Save it again.")

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        """The table and the metadata of a file."""
        raise NotImplementedError

    @classmethod
    def _built(cls: type[Table], frame: pd.DataFrame, about: dict[str, Any]) -> Table:
        """Raises one of Python's errors for a file of the wrong form."""
        raise NotImplementedError


def _rows(rows: Any) -> Iterable[Any]:
    """The rows of a dataset of any engine."""
    if isinstance(rows, pd.DataFrame):
        return rows.to_dict("records")
    for name in ("iter_rows", "to_pylist"):  # of Ray, of Arrow
        if hasattr(rows, name):
            return getattr(rows, name)()
    return rows


def write_table_file(frame: pd.DataFrame, about: Mapping[str, Any], path: Path) -> Path:
    """Write the frame and its metadata. A failed write leaves no partial file behind.

    A column may hold an array of numbers in each row.
    """
    if path.suffix not in ENDINGS:
        raise ArgumentError(
            f"table file: {path} ends in {path.suffix!r}. End it in {', '.join(ENDINGS)}."
        )
    with write_beside(path) as beside:
        if path.suffix == ".parquet":
            frame.attrs.update(about)
            frame.to_parquet(beside)
        elif path.suffix == ".csv":
            # A cell of CSV is text: arrays are written as JSON, and their columns are listed.
            arrays = (n for n in frame if any(isinstance(x, np.ndarray) for x in frame[n]))
            lists = [str(name) for name in arrays]
            cells = {n: [json.dumps(_as_list(x)) for x in frame[n]] for n in lists}
            written = frame.assign(**cells)
            with beside.open("w", encoding="utf-8", newline="") as out:
                out.write(_COMMENT + json.dumps({**about, _LISTS: lists}) + "\n")
                written.to_csv(out, index=False)
        else:
            rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
            content = {**about, "heads" if "name" in frame else "rows": rows}
            try:
                text = json.dumps(content, indent=1, allow_nan=False, default=_as_list)
            except ValueError as error:
                raise OutputError(
                    f"table file: {path} cannot hold an infinite number, as the table does "
                    f"({error}). Save it as .parquet or .csv."
                ) from error
            beside.write_text(text + "\n", "utf-8")
    return path


def read_table_file(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read what `write_table_file` wrote; never a pickle."""
    if path.is_dir():
        raise InputError(f"table file: {path} is a folder. Give a file that headwise saved.")
    if path.suffix not in ENDINGS:
        raise ArgumentError(
            f"table file: {path} does not end in {', '.join(ENDINGS)}. Give a file that headwise "
            f"saved."
        )
    if not path.is_file():
        raise InputError(f"table file: {path} does not exist. Give a file that headwise saved.")
    read = {".parquet": _read_parquet, ".csv": _read_csv, ".json": _read_json}[path.suffix]
    try:
        return read(path)
    except InputError:
        raise
    # pyarrow raises any of these for a damaged file.
    except (ValueError, OSError, LookupError, TypeError, RuntimeError, pa.ArrowException) as error:
        reason = str(error).rstrip(".")
        raise InputError(
            f"table file: {path} cannot be read as {path.suffix[1:]} ({reason}). Give a file that "
            f"headwise saved."
        ) from error


# The columns of a saved frame, checked: a wrong cell is a ValueError, a missing column a KeyError.


def heads_of_rows(frame: pd.DataFrame) -> tuple[Head, ...]:
    """The head of each row of a frame with one row per head."""
    heads = tuple(Head.parse(name) for name in texts_of(frame, "name"))
    if not heads or len(set(heads)) < len(heads):
        raise ValueError(f"{len(heads)} rows of {len(set(heads))} heads")
    return heads


def rows_of(frame: pd.DataFrame, numbers: Iterable[str], texts: Iterable[str] = ()) -> pd.DataFrame:
    """The rows of a frame whose columns have these kinds, each about a head; others stay."""
    frame.attrs.clear()
    heads = [Head.parse(name) for name in texts_of(frame, "name")]
    columns: dict[str, Any] = {name: frame[name] for name in map(str, frame)}
    columns |= {name: numbers_of(frame, name) for name in numbers}
    columns |= {name: texts_of(frame, name) for name in texts}
    return pd.DataFrame(columns | address_columns(heads))


def originals_of_rows(frame: pd.DataFrame) -> tuple[Head | None, ...]:
    """The column `original`: each head's address in the original model, None where it has none."""
    return tuple(Head.parse(name) if name else None for name in texts_of(frame, "original"))


def numbers_of(frame: pd.DataFrame, name: str) -> Float64[np.ndarray, " N"]:
    """A column of numbers; missing cells become NaN."""
    return np.asarray(_column(frame, name), dtype=np.float64)


def indices_of(frame: pd.DataFrame, name: str) -> Int64[np.ndarray, " N"]:
    """A column of whole numbers from 0 on."""
    numbers = numbers_of(frame, name)
    # Beyond 2⁵³ a float skips whole numbers.
    if not ((numbers >= 0) & (numbers < 2.0**53) & (numbers == np.floor(numbers))).all():
        raise ValueError(f"{name} holds {numbers[:5].tolist()}, not indices")
    return numbers.astype(np.int64)


def texts_of(frame: pd.DataFrame, name: str) -> list[str]:
    """A column of texts; missing cells, which a CSV does not distinguish, become empty."""
    cells = ["" if cell is None or cell != cell else cell for cell in _column(frame, name)]
    for cell in cells:
        if not isinstance(cell, str):
            raise ValueError(f"{name} holds {str(cell)[:40]}, not a text")
    return cells


def _column(frame: pd.DataFrame, name: str) -> list[Any]:
    column = frame[name]
    if column.ndim != 1:
        raise ValueError(f"there are several columns {name}")
    return column.tolist()


def _read_parquet(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        kind = kind_of(file.read(16))
    if kind not in ("", "a Parquet file"):
        raise ValueError(f"it is {kind}")
    # pyarrow ends the process if it is asked for a damaged column chunk; a scan raises an error.
    with pq.ParquetFile(path) as content:
        content.scan_contents(batch_size=_BATCH)
    table = pq.ParquetFile(path).read()
    table.validate(full=True)  # texts are UTF-8, among others
    about = parse_json((table.schema.metadata or {}).get(_ATTRIBUTES, b"{}").decode())
    # pandas' own metadata about index and types is not needed, and could be damaged too.
    return table.to_pandas(ignore_metadata=True), _described(about)


def _read_json(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    about = _described(parse_json(decode(path.read_bytes())))
    if isinstance(about.get("format"), str):  # a plan, costs, or a file of task heads
        raise InputError(
            f"table file: {path} is of the format {about['format']:.40}, not a table. Give "
            f"another file."
        )
    rows = about.pop("heads" if "heads" in about else "rows", None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it holds no list of rows")
    return pd.DataFrame(rows), about


# From pandas 3.1 on, numbers are read exactly by default, and the option is deprecated.
_READS_EXACTLY = tuple(int(part) for part in pd.__version__.split(".")[:2]) >= (3, 1)
_EXACT: dict[str, Any] = {} if _READS_EXACTLY else {"float_precision": "round_trip"}


def _read_csv(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    first, _, body = decode(path.read_bytes()).partition("\n")
    if not first.startswith(_COMMENT):
        raise ValueError("its first line is not what headwise writes")
    about = _described(parse_json(first.removeprefix(_COMMENT)))
    # With low_memory pandas reads in chunks and may give one column several types.
    frame = pd.read_csv(io.StringIO(body), low_memory=False, **_EXACT)
    lists = about.pop(_LISTS, [])
    if not isinstance(lists, list) or not all(isinstance(name, str) for name in lists):
        raise ValueError(f"its lists are {str(lists)[:40]}, not names of columns")
    missing = [name for name in lists if name not in frame]
    if missing:
        raise ValueError(f"it has no column {missing[0]!r}")
    for name in lists:
        frame[name] = [parse_json(str(cell)) for cell in _column(frame, name)]
    return frame, about


def _described(about: Any) -> dict[str, Any]:
    if not isinstance(about, dict):
        raise ValueError(f"its metadata is {str(about)[:40]}, not an object")
    versions = about.get("versions", {})
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise ValueError(f"its versions are {str(versions)[:40]}, not texts by name")
    return about


def _as_list(array: np.ndarray) -> list[int | float | None]:
    """Numbers as JSON can hold them: NaN becomes None."""
    return [None if np.isnan(number) else number for number in array.tolist()]
