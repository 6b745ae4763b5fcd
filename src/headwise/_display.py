"""How tables show themselves: some rows at a prompt, all of them in a terminal."""

from shutil import get_terminal_size

import pandas as pd

# Rows at a prompt; of more the first and the last.
_ROWS = 12


def in_columns(frame: pd.DataFrame, rows: int | None = None, width: int | None = None) -> str:
    """A frame as text: a line for each row, its `name` in front.

    Args:
        rows: How many rows at most; of more the first and the last. None is all.
        width: Where lines end. Columns beyond follow below, the names before them again. None
            is nowhere.
    """
    if frame.empty:
        return "none"
    named = frame.set_index("name").rename_axis(None)
    text = named.to_string(
        max_rows=rows, line_width=width, float_format="{:.3g}".format, na_rep="-"
    )
    return "\n".join(map(printable, text.split("\n")))


def at_prompt(title: str, frame: pd.DataFrame) -> str:
    """What an object that is a table shows of itself: what it is, and some rows."""
    return f"{printable(title)}\n{in_columns(frame, _ROWS, get_terminal_size().columns)}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the singular where there is one: `1 text`, `1,200 texts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def printable(text: str) -> str:
    """Text of a corpus or a user, without what would rearrange a terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
