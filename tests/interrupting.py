"""Interrupt a run at one of its lines, as Ctrl-C would."""

import contextlib
import dis
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import headwise

_PACKAGE = str(Path(headwise.__file__).parent)
CONTEXTS = (contextlib.__file__, torch.overrides.__file__, torch.utils.hooks.__file__)


class Interrupts:
    """Raises one `KeyboardInterrupt` when a line of this package, or of other files, begins. A line
    counts once.

    Args:
        line: The number of the line, counted from 0 in the order of the run; None counts alone.
        files: What the name of a file of this package must hold for its lines to be counted.
        others: Other files whose lines count.
    Attributes:
        lines: How many lines were counted.
        where: Where it was raised.
    """

    def __init__(
        self, line: int | None, files: tuple[str, ...] = ("",), others: tuple[str, ...] = ()
    ) -> None:
        self._at, self._files, self._others = line, files, others
        self._seen: set[tuple[CodeType, int]] = set()
        self.where = ""

    @property
    def lines(self) -> int:
        return len(self._seen)

    def run(self, function: Callable[[], object]) -> None:
        """Call a function."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        inside = name.removeprefix(_PACKAGE)
        is_ours = inside != name and any(part in inside for part in self._files)
        if not is_ours and name not in self._others:
            return None
        key = frame.f_code, frame.f_lineno
        is_line = event == "line" and not _leaves_with(frame.f_code, frame.f_lasti)
        if is_line and key not in self._seen:
            self._seen.add(key)
            if self.lines - 1 == self._at:
                self.where = f"{name}:{frame.f_lineno}"
                raise KeyboardInterrupt
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
