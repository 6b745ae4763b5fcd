"""Timing of models: whole forward passes, and their attention blocks."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise._evaluation import in_evaluation
from headwise.models import (
    device_of,
    hooked,
)
from headwise.models.ownership import (
    Attention,
    call_model,
    find_attentions,
)


@dataclass(frozen=True)
class PassTimes:
    """Medians over forward passes, in seconds.

    Attributes:
        whole: The time of the whole pass.
        blocks: The time of each attention block: projections, attention, and what else is in
            the block's module, such as a norm.
    """

    whole: float
    blocks: tuple[float, ...]


@torch.no_grad()
def time_passes(
    models: Sequence[nn.Module],
    batch: Any,
    passes: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> list[PassTimes]:
    """Time forward passes of several models in turn, so that all meet the same noise.

    Whole passes and blocks are timed in separate passes, since reading the clock takes time too.
    The models run in evaluation mode.

    Args:
        batch: The input of every pass.
        passes: The number of passes of each kind that the medians are taken over.
        clock: Returns the time in seconds. `time.process_time` excludes other processes.
    """

    def now(model: nn.Module) -> float:
        if device_of(model).type == "cuda":
            torch.cuda.synchronize()
        return clock()

    attentions = [find_attentions(model, batch) for model in models]
    whole: list[list[float]] = [[] for _ in models]
    blocks: list[list[list[float]]] = [[] for _ in models]
    with in_evaluation(*models):
        for index, model in (passes + 1) * [*enumerate(models)]:
            started = now(model)
            call_model(model, batch)
            whole[index].append(now(model) - started)
            with _timed_blocks(model, attentions[index], partial(now, model)) as times:
                call_model(model, batch)
            blocks[index].append(times)
    # The first pass is a warm-up.
    return [
        PassTimes(
            statistics.median(seconds[1:]),
            tuple(statistics.median(block[1:]) for block in zip(*per_pass, strict=True)),
        )
        for seconds, per_pass in zip(whole, blocks, strict=True)
    ]


@contextmanager
def _timed_blocks(
    model: nn.Module, attentions: Sequence[Attention], now: Callable[[], float]
) -> Iterator[list[float]]:
    """The time of each attention block, in the order of their calls."""
    started: list[float] = []
    seconds: list[float] = []

    def start(*_: Any) -> None:
        started.append(now())

    def stop(*_: Any) -> None:
        seconds.append(now() - started.pop())

    blocks = [model.get_submodule(a) for a in dict.fromkeys(a.around for a in attentions)]
    with hooked([(block, start) for block in blocks], [(block, stop) for block in blocks]):
        yield seconds
