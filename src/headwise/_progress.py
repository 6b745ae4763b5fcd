"""Progress of long work: the callback that reports it, and the bar of tqdm that shows it.

A bar appears after two seconds, in a terminal or a notebook. Elsewhere a line is written to
stderr every 30 seconds. Short work prints nothing.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
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


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[..., None]]:
    """Show the progress of the block, once it takes long; a bar inside another shows nothing.

    Yields:
        `on_progress(done, total, word="")`, to be called with the number of finished steps, the
        number of all steps, and optionally a word on the present step.
    """
    global _bar_is_open
    if not _shown or _bar_is_open:
        yield lambda done, total, word="": None
        return
    with warnings.catch_warnings():  # that a notebook has no widgets: it gets lines
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    in_notebook = tqdm.__module__ == "tqdm.auto"
    interval = 0.5 if in_notebook or sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    bar: Any = tqdm(
        desc=" ".join(printable(label).split()),
        delay=SECONDS_BEFORE_BAR,
        mininterval=interval,
        miniters=0,
        leave=False,
        dynamic_ncols=True,
    )

    def on_progress(done: int, total: int, word: str = "") -> None:
        bar.total = total
        bar.set_postfix_str(printable(word), refresh=False)
        bar.update(done - bar.n)

    _bar_is_open = True
    try:
        yield on_progress
    finally:
        _bar_is_open = False
        bar.close()


def shows_progress(label: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function with `on_progress=` show a bar, unless its caller gives it a callback."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def with_bar(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs.get("on_progress") is not None:
                return function(*args, **kwargs)
            with progress_bar(label) as on_progress:
                kwargs["on_progress"] = on_progress
                return function(*args, **kwargs)

        return with_bar

    return decorate
