"""A progress bar on stderr while something takes long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwise.cli._print import print_note, printable

# Columns of the bar, of everything beside the label, and the fewest of the label.
_BAR_WIDTH, _COLUMNS_BESIDE_LABEL, _MIN_LABEL = 20, 56, 12


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar while the block runs; without a terminal, only print the label.

    Yields:
        `on_progress(done, total, word="")`, to be called with the number of finished steps, the
        number of all steps, and perhaps a word about them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    width = max(_MIN_LABEL, console.width - _COLUMNS_BESIDE_LABEL)
    shown = _shortened(printable(label, console.encoding), width)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(_BAR_WIDTH),
        TextColumn("{task.completed}/{task.total}", markup=False),
        TextColumn("{task.fields[word]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: list[TaskID] = []

        def on_progress(done: int, total: int, word: str = "") -> None:
            if not tasks:  # created at the first call: finished work shows no bar
                tasks.append(bar.add_task(shown, word=""))
                if bar.disable:
                    print_note(label)
            bar.update(tasks[0], completed=done, total=total, word=word)

        yield on_progress


def _shortened(text: str, max_length: int) -> str:
    """The text, without its middle if it is too long: both ends identify a path best."""
    if len(text) <= max_length:
        return text
    kept = max_length - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
