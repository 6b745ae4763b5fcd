"""Hooks that are on a model for a while, and are no part of it."""

from collections.abc import Callable
from typing import Any


class Passing:
    """A hook that belongs to the block that is running, and not to the module that it is on.

    A copy of the module, and what is pickled of it, has a hook in its place that does nothing.
    """

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return None if self._hook is None else self._hook(*args)

    def __reduce__(self) -> tuple[type["Passing"], tuple[()]]:
        return Passing, ()
