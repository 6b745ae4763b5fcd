"""Progress of long work: the callback that reports it, and the bar that shows it.

A bar appears after two seconds, in a terminal or a notebook. Elsewhere a line is written to
stderr every 30 seconds. Short work prints nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from html import escape
from importlib import import_module
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from headwise._display import printable

Progress = Callable[[int, int], None]
"""Called with the number of steps done and the number of steps in all."""


class Passes:
    """Several passes over some work as one progress; each pass counts its own steps."""

    def __init__(self, on_progress: Progress | None, steps: int) -> None:
        """Report to `on_progress`, if there is one; `steps` are those of all passes together."""
        self._on_progress, self._steps, self._before = on_progress, steps, 0

    def __call__(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(self._before + done, self._steps)
        if done == total:
            self._before += total


SECONDS_BEFORE_BAR = 2.0
SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_UPDATES = 0.5  # of a bar in a notebook
# Columns of the bar, of everything beside the label, and the fewest of the label.
_BAR_WIDTH, _COLUMNS_BESIDE_LABEL, _MIN_LABEL = 20, 56, 12

P = ParamSpec("P")
R = TypeVar("R")

_shown = True
_bar_is_open = False


def progress(shown: bool) -> None:
    """Turn progress bars for long work on or off; they are on by default.

    A function that takes `on_progress=` calls it in either case, and then shows no bar.
    """
    global _shown
    _shown = shown


class _Steps:
    """The progress of some work: its label, the steps done and in all, and a word on the step."""

    def __init__(self, label: str) -> None:
        self.label = " ".join(printable(label).split())
        self.done, self.total, self.word = 0, 0, ""
        self.start = self._latest = time.monotonic()

    def __call__(self, done: int, total: int, word: str = "") -> None:
        if done < self.done:  # another stage, whose steps may take another time
            self.start = self._latest
        self._latest = time.monotonic()
        self.done, self.total, self.word = done, total, word

    @property
    def seconds_left(self) -> float | None:
        """The time that the remaining steps take at the speed so far; None before the first."""
        if not 0 < self.done <= self.total:
            return None
        return (time.monotonic() - self.start) / self.done * (self.total - self.done)

    def state(self) -> str:
        """The steps and the remaining time: `3/8 reading, 0:05 left`."""
        seconds = self.seconds_left
        if seconds is None:
            return f"{_clock(time.monotonic() - self.start)} so far"
        word = f" {printable(self.word)}" if self.word else ""
        return f"{self.done}/{self.total}{word}, {_clock(seconds)} left"

    def line(self) -> str:
        """The label and the state."""
        return f"{self.label}: {self.state()}"

    def html(self) -> str:
        """The progress as a bar of HTML."""
        value = f'value="{self.done}" max="{self.total}"' if self.total else ""
        return f'<progress {value} style="width:12em"></progress> {escape(self.line())}'


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """Show the progress of the block, once it takes long; a bar inside another shows nothing.

    Yields:
        `on_progress(done, total, word="")`, to be called with the number of finished steps, the
        number of all steps, and optionally a word on the present step.
    """
    global _bar_is_open
    steps = _Steps(label)
    if not _shown or _bar_is_open:
        yield steps
        return
    _bar_is_open = True
    finished = threading.Event()
    thread = threading.Thread(target=_show, args=(steps, finished), daemon=True)
    thread.start()
    try:
        yield steps
    finally:
        _bar_is_open = False
        finished.set()
        thread.join()


def shows_progress(label: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function show a bar, unless its caller gives it `on_progress`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        reports = "on_progress" in signature(function).parameters

        @wraps(function)
        def with_bar(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs.get("on_progress") is not None:
                return function(*args, **kwargs)
            with progress_bar(label) as on_progress:
                if reports:
                    kwargs["on_progress"] = on_progress
                return function(*args, **kwargs)

        return with_bar

    return decorate


def _show(steps: _Steps, finished: threading.Event) -> None:
    """Show the steps until the work is finished, if it takes long; in a thread of its own."""
    if finished.wait(SECONDS_BEFORE_BAR):
        return
    if _in_notebook():
        _show_in_notebook(steps, finished)
        return
    console = _terminal()
    if console is not None:
        _show_in_terminal(steps, finished, console)
        return
    wait = SECONDS_BETWEEN_LINES - SECONDS_BEFORE_BAR
    while not finished.wait(wait):
        with suppress(OSError):  # a log on a full disk, which the work itself may report
            print(steps.line(), file=sys.stderr, flush=True)
        wait = SECONDS_BETWEEN_LINES


def _terminal() -> Any:
    """The terminal that a bar can be drawn on; None where there is none, or rich is missing."""
    try:
        console = import_module("rich.console").Console(stderr=True)
    except ModuleNotFoundError:
        return None
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _show_in_terminal(steps: _Steps, finished: threading.Event, console: Any) -> None:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(_BAR_WIDTH),
        TextColumn("{task.fields[state]}", markup=False),
    )
    label = _shortened(steps.label, max(_MIN_LABEL, console.width - _COLUMNS_BESIDE_LABEL))
    # This thread alone writes, and what others print is not replaced.
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(label, total=None, state="")
        ended = False
        while True:
            total = steps.total or None
            bar.update(task, completed=steps.done, total=total, state=steps.state(), refresh=True)
            if ended:
                return
            ended = finished.wait(_SECONDS_BETWEEN_UPDATES)


def _show_in_notebook(steps: _Steps, finished: threading.Event) -> None:
    """A bar of plain HTML, which needs no widgets."""
    display: Any = import_module("IPython.display")
    handle = display.display(display.HTML(steps.html()), display_id=True)
    while not finished.wait(_SECONDS_BETWEEN_UPDATES):
        handle.update(display.HTML(steps.html()))
    handle.update(display.HTML(""))


def _in_notebook() -> bool:
    """Whether IPython runs here as the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _shortened(text: str, max_length: int) -> str:
    """The text, without its middle if it is too long: both ends identify a path best."""
    if len(text) <= max_length:
        return text
    kept = max_length - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
