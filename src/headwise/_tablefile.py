"""A frame and what it is about in one file: Parquet, CSV or JSON by the file's ending."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from headwise._table_limits import check_table_size
from headwise.errors import ArgumentError, InputError
from headwise.files import write_beside

T = TypeVar("T")

ENDINGS = (".parquet", ".csv", ".json")
# The first line of a CSV carries what the other formats keep in their metadata.
_COMMENT = "# "
# Where that line says which columns of a CSV hold lists.
_LISTS = "lists"


def check_ending(path: Path) -> None:
    """Refuse an ending that names no format, before any work is done."""
    if path.suffix not in ENDINGS:
        raise ArgumentError(
            f"table file: {path} ends in {path.suffix!r}. End it in {', '.join(ENDINGS)}."
        )


def write_table_file(frame: pd.DataFrame, about: Mapping[str, Any], path: Path) -> Path:
    """Write the frame and its description; nothing half-written is left behind.

    A column may hold an array of numbers in each row.
    """
    check_ending(path)
    with write_beside(path) as beside:
        if path.suffix == ".parquet":
            frame.attrs.update(about)
            frame.to_parquet(beside)
        elif path.suffix == ".csv":
            lists = [str(name) for name in frame if _holds_lists(frame[name])]
            written = frame.assign(**{name: frame[name].map(_as_json) for name in lists})
            with beside.open("w", encoding="utf-8", newline="") as out:
                out.write(_COMMENT + json.dumps({**about, _LISTS: lists}) + "\n")
                written.to_csv(out, index=False)
        else:
            rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
            whole = json.dumps(
                {**about, "heads": rows}, indent=1, allow_nan=False, default=_as_list
            )
            beside.write_text(whole + "\n", "utf-8")
    return path


def read_table_file(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read what `write_table_file` wrote; never a pickle."""
    check_ending(path)
    if not path.is_file():
        raise InputError(f"table file: {path} does not exist. Give a file that was saved.")
    check_table_size(path)
    try:
        return _read(path)
    except KeyError as error:
        raise InputError(
            f"table file: {path} has no {error}. Give a table that headwise saved."
        ) from error
    except (ValueError, OSError) as error:
        raise InputError(
            f"table file: {path} cannot be read as {path.suffix[1:]} ({error}). Save it anew."
        ) from error


def read_saved(
    kind: str,
    path: str | Path,
    schema: tuple[str, int],
    build: Callable[[pd.DataFrame, dict[str, Any]], T],
) -> T:
    """Read what an object of this kind saved, and build it again.

    Args:
        schema: The name under which its version stands in the file, and the version.
    Raises:
        InputError: the file is missing, or holds no such object of this version.
    """
    frame, about = read_table_file(Path(path))
    name, version = schema
    if about.get(name) != version:
        raise InputError(
            f"{kind}.load: {path} has schema {about.get(name)!r}, not {version}. "
            f"Give a file that {kind}.save of this version of headwise wrote."
        )
    try:
        return build(frame, about)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{kind}.load: {path} is not whole ({error}). Save it anew.") from error


def _read(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    if path.suffix == ".parquet":
        frame = pd.read_parquet(path)
        return frame, {str(key): value for key, value in frame.attrs.items()}
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        about = json.loads(text)
        return pd.DataFrame(about.pop("heads")), about
    about = json.loads(text.splitlines()[0].removeprefix(_COMMENT))
    with path.open(encoding="utf-8") as lines:
        frame = pd.read_csv(lines, skiprows=1)
    lists = about.pop(_LISTS, [])
    return frame.assign(**{name: frame[name].map(json.loads) for name in lists}), about


def _holds_lists(column: pd.Series) -> bool:
    return any(isinstance(cell, np.ndarray) for cell in column)


def _as_json(array: np.ndarray) -> str:
    return json.dumps(_as_list(array))


def _as_list(array: np.ndarray) -> list[float | None]:
    """Numbers that JSON can hold; None for what is none."""
    return [None if np.isnan(one) else one for one in array.tolist()]
