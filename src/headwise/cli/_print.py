"""What commands print: lines of the result, notes on stderr, JSON and tables."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from headwise import _progress
from headwise.files import without_nan

if TYPE_CHECKING:
    import pandas as pd

USAGE_ERROR = 2
"""The exit code of a command that cannot work with its input."""

# Notes about the input, until the work begins. A command that refuses says one line: why.
_notes_on_input: list[str] = []


def print_result(line: str) -> None:
    """Print a line of the result."""
    _print_notes_on_input()
    print(escaped(line, sys.stdout.encoding), flush=True)


def print_note(line: str) -> None:
    """Print a line about the work to stderr, separate from the result."""
    _print_notes_on_input()
    print(escaped(line, sys.stderr.encoding), file=sys.stderr, flush=True)


def note_input(line: str) -> None:
    """Print a note about the input as soon as the work begins: with its first step or its end."""
    _notes_on_input.append(line)


def _print_notes_on_input() -> None:
    while _notes_on_input:
        line = _notes_on_input.pop(0)
        print(escaped(line, sys.stderr.encoding), file=sys.stderr, flush=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """The library's bar, whose first step prints the notes about the input."""
    with _progress.progress_bar(label) as bar:

        def on_progress(done: int, total: int, word: str = "") -> None:
            _print_notes_on_input()
            bar(done, total, word)

        yield on_progress


def print_error(message: str) -> int:
    """Print an error as one line, whatever it contains, and return the exit code for it."""
    _notes_on_input.clear()
    print_note(" ".join(message.split()))
    return USAGE_ERROR


def print_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print JSON that any program can read: NaN becomes null."""
    _print_notes_on_input()
    print(json.dumps(without_nan(content), indent=1, allow_nan=False))


def print_table(frame: "pd.DataFrame") -> None:
    """Print the rows of a table: folded to a terminal's width, or one line per row in a pipe."""
    from headwise.tables import in_columns

    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in in_columns(frame, width=width).split("\n"):
        print_result(line.rstrip())


def print_heads(frame: "pd.DataFrame") -> None:
    """Print a table with a row per head by name, without the columns that do not apply."""
    print_table(frame.dropna(axis="columns", how="all").drop(columns=["stack", "layer", "head"]))


def escaped(text: str, encoding: str | None) -> str:
    """Escape characters that control the terminal or that its encoding lacks."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or "utf-8"  # a replaced stream may have none
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)
