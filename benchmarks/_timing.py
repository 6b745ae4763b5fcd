"""Interleaved timing of several variants, so that a busy moment affects all of them."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Paired:
    """The median of paired ratios or differences, and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Paired":
        """The median lies between these order statistics with 95 % confidence, for any noise."""
        ordered = sorted(values)
        n = len(ordered)
        reach = 0.98 * math.sqrt(n)
        low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
        return cls(statistics.median(ordered), ordered[low], ordered[high])

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Times:
    """The seconds of each variant in each round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        """The median of the rounds, in milliseconds."""
        return 1000 * statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> Paired:
        """The time of `name` divided by that of `base`, round by round."""
        return Paired.of(
            seconds / base_seconds for seconds, base_seconds in self._pairs(name, base)
        )

    def difference(self, name: str, base: str) -> Paired:
        """The milliseconds that `name` takes more than `base`, round by round."""
        return Paired.of(
            1000 * (seconds - base_seconds) for seconds, base_seconds in self._pairs(name, base)
        )

    def _pairs(self, name: str, base: str) -> Iterable[tuple[float, float]]:
        return zip(self.seconds[name], self.seconds[base], strict=True)


def interleaved(
    works: Mapping[str, Work],
    rounds: int,
    clock: str = "wall",
    inside: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    untimed: int = 1,
    is_warm: bool = False,
) -> Times:
    """Time every variant once in each round, in random order.

    A variant named in `inside` runs within its context, which is entered again in each round; its
    first runs there, `untimed` of them, are not timed. Where `is_warm`, each has run before.
    """
    now = CLOCKS[clock]
    inside = inside or {}
    for work in () if is_warm else works.values():  # the first run includes the setup
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    order, rng = list(works), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            with inside.get(name, nullcontext)():
                for _ in range(untimed if name in inside else 0):
                    works[name]()
                _wait()
                started = now()
                works[name]()
                _wait()
                seconds[name].append(now() - started)
    return Times(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_for(works: Mapping[str, Work], seconds: float, least: int = 5, most: int = 200) -> int:
    """How many rounds fit into `seconds`."""
    started = time.perf_counter()
    for work in works.values():
        work()
    _wait()
    return max(least, min(most, int(seconds / (time.perf_counter() - started))))


def timed_for(
    works: Mapping[str, Work], seconds: float, clock: str = "wall", least: int = 5, most: int = 200
) -> Times:
    """Time every variant in as many rounds as fit into `seconds`."""
    return interleaved(works, rounds_for(works, seconds, least, most), clock, is_warm=True)


def kernels_of(work: Work) -> str:
    """The attention kernels of torch that `work` calls."""
    with torch.profiler.profile() as profile:
        work()
    start = "aten::_scaled_dot_product_"
    kernels = {event.key for event in profile.key_averages() if event.key.startswith(start)}
    return ", ".join(sorted(key.removeprefix(start) for key in kernels)) or "none of torch's"
