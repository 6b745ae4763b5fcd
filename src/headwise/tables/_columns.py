"""Tables as text: a few rows at a prompt, all rows in a terminal."""

from collections.abc import Sequence
from shutil import get_terminal_size

import pandas as pd

from headwise._display import printable
from headwise.tables._heads import Head

# The number of rows at a prompt. Longer tables show their first and last rows.
_ROWS = 12


def address_columns(heads: Sequence[Head]) -> dict[str, object]:
    """The columns that every table of heads begins with: name, stack, layer, head."""
    return {
        "name": [str(head) for head in heads],
        "stack": [head.stack for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
    }


def in_columns(frame: pd.DataFrame, rows: int | None = None, width: int | None = None) -> str:
    """A frame as text, one line per row, with the column `name` first.

    Args:
        rows: The maximal number of rows; longer frames show their first and last rows. None
            shows all.
        width: The maximal length of a line; further columns follow below, with the names
            repeated. None does not wrap.
    """
    if frame.empty:
        return "none"
    named = frame.set_index("name").rename_axis(None)
    text = named.to_string(
        max_rows=rows, line_width=width, float_format="{:.3g}".format, na_rep="-"
    )
    return "\n".join(map(printable, text.split("\n")))


def at_prompt(title: str, frame: pd.DataFrame) -> str:
    """The `repr` of a table: a title and a few rows."""
    return f"{printable(title)}\n{in_columns(frame, _ROWS, get_terminal_size().columns)}"
