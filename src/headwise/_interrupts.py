"""Context managers that an interrupt (Ctrl-C) cannot leave half entered or half left.

Python raises `KeyboardInterrupt` between any two instructions: after a hook was registered and
before it was noted for removal, or on the first instruction of `__exit__`. While one of these
contexts is open, a handler of SIGINT inspects the stack. An interrupt inside code that changes or
restores a model is deferred until that code is done; any other goes to the previous handler.

Only the main thread is interrupted by Python, so nothing is deferred in others.
"""

import atexit
import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Functions of this file that are not interrupted, including everything they call.
_PROTECTED = ("call_whole", "enter_whole")
_FILE = (lambda: None).__code__.co_filename
# While torch calls a function mode, a context manager of its own removes the mode.
_OF_MODES = "handle_torch_function"


class _Interrupts:
    """The handler of SIGINT while it is held, and the deferred interrupt, if there is one."""

    def __init__(self) -> None:
        self._holders, self._is_deferred = 0, False
        self._original: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    def hold(self) -> bool:
        """Handle SIGINT from now on; False if that is impossible or unnecessary."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._holders == 0:
            handler = signal.getsignal(signal.SIGINT)
            if not callable(handler):  # ignored, or it ends the process
                return False
            self._is_deferred = False
            if handler != self._handle:
                self._original = handler
                signal.signal(signal.SIGINT, self._handle)
        self._holders += 1
        return True

    def release(self) -> None:
        """Undo one `hold`; the last one restores the previous handler."""
        self._holders -= 1
        is_main = threading.current_thread() is threading.main_thread()
        # A handler that other code has set meanwhile stays.
        if is_main and self._holders == 0 and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._original)

    def deliver(self, frame: FrameType | None) -> None:
        """Raise the deferred interrupt, unless a caller of `frame` must not be interrupted."""
        is_main = threading.current_thread() is threading.main_thread()
        if (
            self._is_deferred
            and is_main
            and frame is not None
            and not self._is_protected(frame.f_back)
        ):
            self._is_deferred = False
            self._original(signal.SIGINT, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_protected(frame):
            self._is_deferred = True
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
# What is open, the outer before the inner, and how each is closed.
_open: "weakref.WeakKeyDictionary[Any, Callable[[Any], object]]" = weakref.WeakKeyDictionary()


def close_at_exit(opened: T, close: Callable[[T], object]) -> None:
    """Have an object closed when Python ends, while all modules exist, if it still exists then."""
    _open[opened] = close


@atexit.register
def _close_all() -> None:
    for opened, close in list(_open.items()):
        with contextlib.suppress(ValueError):  # a daemon thread is inside it
            close(opened)


def deliver_interrupt() -> None:
    """Raise a deferred interrupt, unless a caller must not be interrupted."""
    _interrupts.deliver(sys._getframe())


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Defer interrupts of a function until it is done."""

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
    """Exits without interruption; an interrupt while entering undoes the entry."""

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
            suppressed: bool | None = self._block.__exit__(kind, error, trace)
            return suppressed
        finally:
            self._release()

    def __del__(self) -> None:
        # The interrupt came after entry but before the `with` statement took over.
        if self.__dict__.get("_held"):
            self._abandon()

    @uninterrupted
    def _hold(self) -> None:
        self._held = _interrupts.hold()
        close_at_exit(self, _SlowlyReversible._abandon)

    @uninterrupted
    def _abandon(self) -> None:
        self._block.gen.close()
        self._release()

    def _release(self) -> None:
        _open.pop(self, None)
        if self._held:
            self._held = False
            _interrupts.release()


class _Reversible(_SlowlyReversible[T]):
    """Enters and exits without interruption."""

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
    """Like `contextlib.contextmanager`, for changes that are undone when the block ends.

    An interrupt during entry or exit is deferred until the change is made or undone. Contexts
    that take long to enter use `slowly_reversible`.
    """
    manage = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Reversible(lambda: manage(*args, **kwargs))

    return make


@reversible
def deferring() -> Iterator[None]:
    """Hold the handler of SIGINT for an object that an `uninterrupted` call closes."""
    yield


def slowly_reversible(
    function: Callable[P, Iterator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Like `reversible`, for contexts that run a model before they change it.

    An interrupt ends the run. All changes must be made by contexts that are `reversible`.
    """
    manage = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _SlowlyReversible(lambda: manage(*args, **kwargs))

    return make
