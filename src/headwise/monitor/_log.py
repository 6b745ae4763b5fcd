"""Logs of scalars: a TensorBoard-like writer, or any function."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch.distributed as dist

from headwise.monitor._alarms import Alarm


@runtime_checkable
class ScalarWriter(Protocol):
    """Anything that writes scalars as TensorBoard's `SummaryWriter` does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


Log = ScalarWriter | Callable[[dict[str, float], int], object]


def is_first_rank(group: dist.ProcessGroup | None) -> bool:
    """Whether this process is the one of its group that logs."""
    is_distributed = dist.is_available() and dist.is_initialized()
    return not is_distributed or dist.get_rank(group) == 0


def publish(
    scalars: Mapping[str, float],
    alarms: Iterable[Alarm],
    step: int,
    log: Log | None,
    on_alarm: Callable[[Alarm], object] | None,
) -> None:
    """Hand the scalars of one step to a log, and its new alarms to a function."""
    if log is not None:
        _write(log, scalars, step)
    if on_alarm is not None:
        for alarm in alarms:
            on_alarm(alarm)


def _write(log: Log, scalars: Mapping[str, float], step: int) -> None:
    """Write the scalars of one step to a log."""
    if isinstance(log, ScalarWriter):
        for name, value in scalars.items():
            log.add_scalar(name, value, step)
    else:
        log(dict(scalars), step)
