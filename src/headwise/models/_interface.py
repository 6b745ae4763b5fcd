"""Wrappers around the attention functions of transformers, whatever implementation computes.

The function that `AttentionInterface.get_interface` returns is wrapped, innermost first by the one
that reads caches, then by the one that captures calls. So both may begin and end in any order.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import AttentionInterface

# Gets the attention function, the name of the implementation, and the arguments of the call.
Wrapper = Callable[..., Any]
# The places of the wrappers, the innermost first.
CACHES, CAPTURES = range(2)

_lock = threading.Lock()
_wrappers: list[Wrapper | None] = [None, None]
_open = [0, 0]
_original: Any = None


def wrap_interface(wrapper: Wrapper, place: int) -> None:
    """Wrap attention functions until `unwrap_interface` was called as often."""
    global _original
    with _lock:
        if not any(_open):
            _original = AttentionInterface.get_interface
            AttentionInterface.get_interface = _get_interface
        _open[place] += 1
        _wrappers[place] = wrapper


def unwrap_interface(place: int) -> None:
    """Undo one `wrap_interface`; the last one restores the function of transformers."""
    with _lock:
        _open[place] -= 1
        if _open[place] == 0:
            _wrappers[place] = None
        if not any(_open):
            AttentionInterface.get_interface = _original


def _get_interface(
    interface: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    attend = _original(interface, implementation, default)
    for wrapper in _wrappers:
        if wrapper is not None:
            attend = partial(wrapper, attend, implementation)
    return attend
