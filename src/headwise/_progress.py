"""The callback that reports the progress of long work."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the number of steps done and the number of steps in all."""
