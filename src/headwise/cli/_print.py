"""What commands print: lines of the result, notes on stderr, JSON and tables."""

import json
import sys
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

USAGE_ERROR = 2
"""The exit code of a command that cannot work with its input."""


def print_result(line: str) -> None:
    """Print a line of the result."""
    print(printable(line, sys.stdout.encoding), flush=True)


def print_note(line: str) -> None:
    """Print a line about the work to stderr, separate from the result."""
    print(printable(line, sys.stderr.encoding), file=sys.stderr, flush=True)


def print_error(message: str) -> int:
    """Print an error as one line, whatever it contains, and return the exit code for it."""
    print_note(" ".join(message.split()))
    return USAGE_ERROR


def print_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print JSON that any program can read: NaN becomes null."""
    print(json.dumps(_without_nan(content), indent=1, allow_nan=False))


def print_table(frame: "pd.DataFrame") -> None:
    """Print the rows of a table: folded to a terminal's width, or one line per row in a pipe."""
    from headwise.tables import in_columns

    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in in_columns(frame, width=width).split("\n"):
        print_result(line)


def print_heads(frame: "pd.DataFrame") -> None:
    """Print a table with a row per head by name, without the columns that do not apply."""
    print_table(frame.dropna(axis="columns", how="all").drop(columns=["stack", "layer", "head"]))


def printable(text: str, encoding: str | None) -> str:
    """Escape characters that control the terminal or that its encoding lacks."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or "utf-8"  # a replaced stream may have none
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def _without_nan(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    return None if content != content else content  # only NaN differs from itself
