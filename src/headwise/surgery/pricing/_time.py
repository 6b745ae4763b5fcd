"""How long models take: whole passes, and the blocks in which heads attend."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise._interrupts import reversible
from headwise.models import Attention, call_model, find_attentions, hooked, in_evaluation


@dataclass(frozen=True)
class PassTimes:
    """Medians over passes, in seconds.

    Attributes:
        whole: Of the whole pass.
        blocks: Of each attention block of the pass: projections, attention, and what
            the model counts to it, such as a norm.
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
    """Time models beside each other: they take turns, so that all meet the same noise.

    Whole passes are timed apart from their blocks, since to look at a clock takes time too. They
    run in evaluation mode.

    Args:
        batch: What each of them is run on.
        passes: How many of each the medians are of.
        clock: What tells the time in seconds. `time.process_time` leaves out what other
            processes took.
    """

    def now(model: nn.Module) -> float:
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        return clock()

    found = [find_attentions(model, batch) for model in models]
    whole: list[list[float]] = [[] for _ in models]
    blocks: list[list[list[float]]] = [[] for _ in models]
    with in_evaluation(*models):
        for at, model in (passes + 1) * [*enumerate(models)]:
            started = now(model)
            call_model(model, batch)
            whole[at].append(now(model) - started)
            with _clocks(model, found[at], partial(now, model)) as times:
                call_model(model, batch)
            blocks[at].append(times)
    # The first pass also sets things up.
    return [
        PassTimes(
            statistics.median(one[1:]),
            tuple(statistics.median(block[1:]) for block in zip(*many, strict=True)),
        )
        for one, many in zip(whole, blocks, strict=True)
    ]


@reversible
def _clocks(
    model: nn.Module, attentions: Sequence[Attention], now: Callable[[], float]
) -> Iterator[list[float]]:
    """How long each attention block takes, in the order of their calls."""
    started: list[float] = []
    taken: list[float] = []

    def start(*_: Any) -> None:
        started.append(now())

    def stop(*_: Any) -> None:
        taken.append(now() - started.pop())

    blocks = [model.get_submodule(a) for a in dict.fromkeys(a.around for a in attentions)]
    with hooked([(block, start) for block in blocks], [(block, stop) for block in blocks]):
        yield taken
