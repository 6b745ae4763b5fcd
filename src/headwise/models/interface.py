"""Wrappers around the attention functions of transformers, whatever implementation computes.

The function that `AttentionInterface.get_interface` returns is wrapped, innermost first by the one
that reads caches, then by the one that lets heads stream, then by the one that captures calls. So
all may begin and end in any order.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, no_type_check

from transformers import AttentionInterface

from headwise.models._hooks import Block, SharedSetting

# Gets the attention function, the name of the implementation, and the arguments of the call.
Wrapper = Callable[..., Any]
# The places of the wrappers, the innermost first.
CACHES, STREAMS, CAPTURES = range(3)

_wrappers: list[Wrapper | None] = [None, None, None]
_blocks: tuple[weakref.WeakSet[Block], ...] = (
    weakref.WeakSet(),
    weakref.WeakSet(),
    weakref.WeakSet(),
)


@contextmanager
def wrapped_interface(wrapper: Wrapper, place: int) -> Iterator[None]:
    """Wrap attention functions while the block runs. A place has one wrapper, for all blocks."""
    block = Block()
    try:
        _blocks[place].add(block)
        _wrappers[place] = wrapper
        with _setting.changed():
            yield
    finally:
        _blocks[place].discard(block)
        if not _blocks[place]:
            _wrappers[place] = None


@no_type_check  # which a compiler cannot trace
def _get_interface(interface, implementation, default):
    attend = _setting.original(interface, implementation, default)
    for wrapper in _wrappers:
        if wrapper is not None:
            attend = partial(wrapper, attend, implementation)
    return attend


def _set_interface(function: Any) -> None:
    AttentionInterface.get_interface = function


_setting = SharedSetting(lambda: AttentionInterface.get_interface, _set_interface, _get_interface)
