"""Logs of scalars: a TensorBoard-like writer, or any function."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class ScalarWriter(Protocol):
    """Anything that writes scalars as TensorBoard's `SummaryWriter` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


Log = ScalarWriter | Callable[[dict[str, float], int], object]


def write(log: Log, scalars: Mapping[str, float], step: int) -> None:
    """Write the scalars of one step to a log."""
    if isinstance(log, ScalarWriter):
        for name, value in scalars.items():
            log.add_scalar(name, value, step)
    else:
        log(dict(scalars), step)
