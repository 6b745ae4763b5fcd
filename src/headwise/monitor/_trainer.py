"""What `transformers.Trainer` expects of a callback."""

from collections.abc import Callable
from typing import TYPE_CHECKING


class TrainerEvents:
    """A callback of `transformers.Trainer` that ignores the events it has no method for."""

    if not TYPE_CHECKING:  # so that type checkers still find a misspelled name

        def __getattr__(self, name: str) -> Callable[..., None]:
            # A trainer calls a method for each of its events, and versions add events.
            if name.startswith("on_"):
                return lambda *_, **__: None
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
