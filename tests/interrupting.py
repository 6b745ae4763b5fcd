"""Interrupt a run at one of its lines, as Ctrl-C would."""

import contextlib
import dis
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import headwise

_PACKAGE = str(Path(headwise.__file__).parent)
_AROUND = (contextlib.__file__, torch.overrides.__file__, torch.utils.hooks.__file__)


class Interrupts:
    """Sends one SIGINT when a line of this package, or of what its contexts stand on, begins.

    Args:
        at: The number of the line event, counted from 0.
        times: How often the same line may come before it is counted no more.
        files: What the name of a file must hold for its lines to be counted.
    Attributes:
        lines: How many line events were counted.
    """

    def __init__(self, line: int | None, times: int = 1, files: tuple[str, ...] = ("",)) -> None:
        self._at, self._times, self._files = line, times, files
        self._seen: Counter[tuple[CodeType, int]] = Counter()
        self.lines = 0
        self.where = ""

    def run(self, function: Callable[[], object]) -> bool:
        """Call a function; return whether it raised an interrupt."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, *_AROUND)):
            return None
        if name.startswith(_PACKAGE) and not any(part in name for part in self._files):
            return None
        if frame.f_code.co_name == "__del__":  # where Python never raises
            return None
        if event == "line" and not _leaves_with(frame.f_code, frame.f_lasti):
            key = (frame.f_code, frame.f_lineno)
            self._seen[key] += 1
            if self._seen[key] <= self._times:
                self.lines += 1
                if self.lines - 1 == self._at:
                    self.where = f"{name}:{frame.f_lineno}"
                    signal.raise_signal(signal.SIGINT)
        return self._trace


def _leaves_with(code: CodeType, offset: int) -> bool:
    """Whether a `with` statement is about to call `__exit__`.

    Python sees to no signal there, since no exception could reach `__exit__` any more.
    """
    return offset in _exits(code)


@cache
def _exits(code: CodeType) -> frozenset[int]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "NOP"]
    return frozenset(
        step.offset
        for step, *following in zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
        if all(two.opname == "LOAD_CONST" and two.argval is None for two in (step, *following[:2]))
        or (step.opname == "SWAP" and all(two.argval is None for two in following))
    )
