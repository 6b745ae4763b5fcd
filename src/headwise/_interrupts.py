"""Context managers that an interrupt (Ctrl-C) cannot leave half entered or half left.

Python raises `KeyboardInterrupt` between any two instructions: after a hook was registered and
before it was noted for removal, or on the first instruction of `__exit__`. While one of these
contexts is open, a handler of SIGINT looks at the stack. An interrupt of code that changes a
model, or changes it back, waits until that is done; any other goes to the handler of before.

Only the main thread is interrupted by Python, so nothing is deferred in others.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The functions of this file that are not interrupted, nor whatever they call.
_PROTECTED = ("call_whole", "enter_whole")
_FILE = (lambda: None).__code__.co_filename
# While torch calls a function mode it takes it off, by a context manager of its own.
_OF_MODES = "handle_torch_function"


class _Interrupts:
    """The handler of SIGINT while anybody holds it, and the interrupt that waits, if one does."""

    def __init__(self) -> None:
        self._holders, self._waits = 0, False
        self._original: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    def hold(self) -> bool:
        """Handle SIGINT from now on; False where that is impossible or there is no need."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._holders == 0:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):  # ignored, or it ends the process
                return False
            self._waits = False
            if handler != self._handle:
                self._original = handler
                signal.signal(signal.SIGINT, self._handle)
        self._holders += 1
        return True

    def release(self) -> None:
        """Undo one `hold`; the last one puts the handler of before back."""
        self._holders -= 1
        here = threading.current_thread() is threading.main_thread()
        # Somebody may have set a handler of their own meanwhile: theirs stays.
        if here and self._holders == 0 and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._original)

    def deliver(self, frame: FrameType | None) -> None:
        """Pass on the interrupt that waits, unless a caller of `frame` must not be interrupted."""
        here = threading.current_thread() is threading.main_thread()
        if self._waits and here and frame is not None and not self._is_protected(frame.f_back):
            self._waits = False
            self._original(signal.SIGINT, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_protected(frame):
            self._waits = True
        else:
            self._original(number, frame)

    def _is_protected(self, frame: FrameType | None) -> bool:
        file = ""
        while frame is not None:
            code = frame.f_code
            if code.co_name in _PROTECTED and code.co_filename == _FILE:
                return True
            if code.co_name == _OF_MODES and file == contextlib.__file__:
                return True
            file, frame = code.co_filename, frame.f_back
        return False


_interrupts = _Interrupts()


def deliver_interrupt() -> None:
    """Raise the interrupt that waits, if one does and nobody around is uninterrupted."""
    _interrupts.deliver(sys._getframe())


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """A function that an interrupt does not cut short: it is raised when the function is done."""

    @wraps(function)
    def call_whole(*args: P.args, **kwargs: P.kwargs) -> T:
        held = _interrupts.hold()
        try:
            return function(*args, **kwargs)
        finally:
            if held:
                _interrupts.release()
                _interrupts.deliver(sys._getframe())

    return call_whole


class _SlowlyReversible(AbstractContextManager[T]):
    """Leaves its block uninterrupted; entering it can be interrupted, and is then undone."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._block, self._held, self._entered = make(), False, False

    def __enter__(self) -> T:
        try:
            self._hold()
            value: T = self._block.__enter__()
            self._entered = True
            return value
        except BaseException:
            self._abandon()
            raise

    @uninterrupted
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        try:
            left: bool | None = self._block.__exit__(kind, error, trace)
            return left
        finally:
            self._release()

    def __del__(self) -> None:
        # Entered, and the interrupt came before the `with` statement knew of it.
        if self.__dict__.get("_held"):
            self._abandon()

    @uninterrupted
    def _hold(self) -> None:
        self._held = _interrupts.hold()

    @uninterrupted
    def _abandon(self) -> None:
        self._block.gen.close()
        self._release()

    def _release(self) -> None:
        if self._held:
            self._held = False
            _interrupts.release()


class _Reversible(_SlowlyReversible[T]):
    """Enters and leaves its block uninterrupted."""

    def enter_whole(self) -> T:
        try:
            value: T = super().__enter__()
            _interrupts.deliver(sys._getframe())
            return value
        except BaseException:
            self._abandon()
            raise

    __enter__ = enter_whole


def reversible(
    function: Callable[P, Iterator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Like `contextlib.contextmanager`, for changes that are taken back when the block ends.

    An interrupt while the block is entered or left waits until the change is made, or taken
    back. For those whose entry takes long, there is `slowly_reversible`.
    """
    manage = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Reversible(lambda: manage(*args, **kwargs))

    return make


@reversible
def deferring() -> Iterator[None]:
    """Nothing but the handler of SIGINT, for objects that are closed by an `uninterrupted` call."""
    yield


def slowly_reversible(
    function: Callable[P, Iterator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """The same for contexts that run a model before they change it: an interrupt ends the run.

    Whatever they change, they change by contexts that are `reversible`.
    """
    manage = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _SlowlyReversible(lambda: manage(*args, **kwargs))

    return make
