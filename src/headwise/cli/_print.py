"""What the terminal gets to see: lines, JSON, a bar while something takes long."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# Columns of a bar, of all that stands beside its label, and the fewest of the label.
_BAR, _BESIDE, _LABEL = 20, 56, 12

USAGE = 2
"""The exit code of a command that was given something it cannot work with."""


def say(line: str) -> None:
    """Print a line of the result."""
    print(_printable(line, sys.stdout.encoding), flush=True)


def note(line: str) -> None:
    """Print a line about what is going on, apart from the result."""
    print(_printable(line, sys.stderr.encoding), file=sys.stderr, flush=True)


def complain(message: str) -> int:
    """Print what is wrong, as one line whatever it holds, and give the exit code for it."""
    note(" ".join(message.split()))
    return USAGE


def say_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print JSON that any program can read: what is not a number is null."""
    print(json.dumps(_finite(content), indent=1, allow_nan=False))


def say_table(frame: "pd.DataFrame") -> None:
    """Print the rows of a table: as wide as a terminal, or a line each where a program reads."""
    from headwise.tables import in_columns

    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in in_columns(frame, width=width).split("\n"):
        say(line)


@contextmanager
def progress(what: str) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr while the block runs; where no one watches, only say that it began.

    Yields:
        What to call with the steps done, the steps in all, and perhaps a word about them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    label = _shortened(_printable(what, console.encoding), max(_LABEL, console.width - _BESIDE))
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(_BAR),
        TextColumn("{task.completed}/{task.total}", markup=False),
        TextColumn("{task.fields[word]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: list[TaskID] = []

        def tell(done: int, total: int, word: str = "") -> None:
            if not tasks:  # no bar for what turns out to be done already
                tasks.append(bar.add_task(label, word=""))
                if bar.disable:
                    note(what)
            bar.update(tasks[0], completed=done, total=total, word=word)

        yield tell


def _shortened(text: str, most: int) -> str:
    """A text without its middle where it is longer than that: both ends of a path tell most."""
    if len(text) <= most:
        return text
    kept = most - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def _printable(text: str, encoding: str | None) -> str:
    """Write out what would steer the terminal, or what it cannot show: names can hold anything."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or "utf-8"  # a stream that someone put in place may have none
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if content != content else content  # only NaN is unlike itself
