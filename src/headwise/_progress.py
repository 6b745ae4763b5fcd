"""The callback that reports the progress of long work."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with how many steps are done, and of how many."""
