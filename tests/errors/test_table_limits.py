"""A file that describes a far larger table than it can hold is refused before it is read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import InputError
from headwise.tables import HeadTable, Scores
from headwise.tables._size_limits import check_table_size


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attempt to read a table fail."""
    for name in ("read_parquet", "read_csv", "DataFrame"):
        monkeypatch.setattr(pd, name, pytest.fail)


def _parquet(path: Path, rows: int, columns: int = 1) -> None:
    """Row groups of zeros, which take almost no space."""
    part = pa.table({f"c{n}": np.zeros(2**20) for n in range(columns)})
    with pq.ParquetWriter(path, part.schema, compression="zstd") as out:
        for _ in range(rows // 2**20):
            out.write_table(part)


def _lists(path: Path) -> None:
    """One row that holds a list of many zeros."""
    whole = pa.array([np.zeros(2**24)], pa.list_(pa.float64()))
    pq.write_table(pa.table({"c": whole}), path)


def _long_pages(path: Path) -> None:
    """A single string of 256 MiB."""
    pq.write_table(pa.table({"c": ["a" * 2**28]}), path, compression="zstd")


def _repeated_text(path: Path) -> None:
    """A text of 64 KiB in each of 10,000 rows."""
    text = pa.DictionaryArray.from_arrays(np.zeros(10_000, np.int32), ["a" * 2**16])
    pq.write_table(pa.table({"c": text.cast(pa.string())}), path)


def _csv(path: Path) -> None:
    path.write_text("# {}\n" + ",".join(f"c{n}" for n in range(9000)) + "\n" + "1\n" * 9000)


def _json(path: Path) -> None:
    path.write_text(json.dumps({"headwise": 1, "heads": [{f"c{n}": 1} for n in range(9000)]}))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("a.parquet", lambda path: _parquet(path, 2**26), r"67,108,864 rows of 1 columns"),
        ("b.parquet", lambda path: _parquet(path, 2**22, 9), r"4,194,304 rows of 9 columns, 37,"),
        ("c.parquet", _lists, r"1 rows of 1 columns, 16,777,216 values"),
        ("d.parquet", _long_pages, r"268,\d+,\d+ uncompressed bytes"),
        ("g.parquet", _repeated_text, r"655,360,000 uncompressed bytes"),
        ("e.csv", _csv, r"9,000 rows of 9,000 columns, 81,000,000 values"),
        ("f.json", _json, r"9,000 rows of 9,000 columns, 81,000,000 values"),
    ],
)
def test_a_table_larger_than_its_file_allows(
    name: str, write: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    for reader in (HeadTable, Scores):
        with pytest.raises(InputError, match=rf"{name} has [\d,]+ bytes and describes.*{says}"):
            reader.load(tmp_path / name)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([".parquet", ".csv", ".json"]))
@settings(max_examples=20)
def test_a_table_of_any_shape_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, ending: str
) -> None:
    path = tmp_path_factory.mktemp("table") / f"t{ending}"
    frame = pd.DataFrame({f"c{n}": np.zeros(100 * rows) for n in range(columns)})
    if ending == ".parquet":
        frame.to_parquet(path)
    elif ending == ".csv":
        path.write_text("# {}\n" + frame.to_csv(index=False))
    else:
        path.write_text(json.dumps({"heads": frame.to_dict("records")}))
    check_table_size(path)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".json"])
@pytest.mark.parametrize("content", [b"", b"[" * 9000, b"\xff" * 9000, b"PAR1" * 4000])
def test_headers_that_cannot_be_parsed_are_left_to_the_reader(
    content: bytes, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"t{ending}"
    path.write_bytes(content)
    check_table_size(path)
    assert path.read_bytes() == content
