"""The tables and pictures of the results on pruning, from stored curves and scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

import headwise as hw
from benchmarks._report import table
from headwise.tables import Curves, bootstrap_means

PLAIN, RANDOM, RECOVERED, REDRAWN = "plain", "random", ", recovered", ", redrawn"
ELSEWHERE = ", scored elsewhere"
CORPORA = {"minilm": "sentence pairs"}  # folders that are not named after their texts
FIRST = 12  # heads of an order that are compared between corpora


def load_curves(path: Path) -> Curves:
    with np.load(path) as file:
        fields: dict[str, Any] = {"per_text": {}, "scores": {}}
        for key in file.files:
            name, _, order = key.partition("/")
            if order:
                fields[name][order] = file[key]
            else:
                fields[name] = file[key] if file[key].ndim else file[key].item()
    return Curves(**fields)


class ModelCurves:
    """The curves of one model."""

    def __init__(self, folder: Path) -> None:
        self.plain = load_curves(folder / f"{PLAIN}.npz")
        self.recovered = self._kept(folder, RECOVERED)
        self.redrawn = self._kept(folder, REDRAWN)
        self.elsewhere = self._kept(folder, ELSEWHERE)
        self.allowed = self.plain.allowance()

    def _kept(self, folder: Path, end: str) -> dict[str, Curves]:
        """The stored curves whose names extend those without recovery."""
        names = (f"{name}{end}" for name in self.plain.per_text)
        paths = {name: folder / f"{name}.npz" for name in names}
        return {name: load_curves(path) for name, path in paths.items() if path.exists()}

    def pictures(self) -> Iterator[list[Curves]]:
        """All orders without recovery; then the recovered ones next to the same without."""
        yield [self.plain]
        later = {name: f"{name}{RECOVERED}" for name in self.plain.per_text if name != RANDOM}
        recovered = {name: self.recovered[x] for name, x in later.items() if x in self.recovered}
        if recovered:
            last = max(int(curves.removed[-1]) for curves in recovered.values())
            yield [part_of(self.plain, list(recovered), last), *recovered.values()]

    def sections(self) -> Iterator[str]:
        full = self.plain.mean(next(iter(self.plain.per_text)))[0, 0]
        start = "" if self.plain.compares else f" The full model's mean loss is {full:.3f}."
        yield f"Heads that can be removed before the loss grows by {self.allowed:.2g}:"
        more = {"scored texts drawn again": REDRAWN, "recovered": RECOVERED}
        ends = {title: end for title, end in more.items() if self._curves(end)}
        yield table(["order", "without recovery", *ends], list(self._elbows(list(ends.values()))))
        yield f"Measured {'; '.join(self._points())}."
        yield (
            "Loss: the mean ± half the width of its 95 % interval; for several orders the mean "
            f"(the least–the largest).{start}"
        )
        yield self._table(growth)
        if self.plain.compares:
            yield "The 95th percentile: one text in twenty loses more than this."
            yield self._table(percentile)
        if self.plain.score:
            known = next(iter(self.plain.scores.values()))[0, 0]
            yield f"Task score ({self.plain.score}; {known:.3f} for the full model):"
            yield self._table(score)

    def _points(self) -> Iterator[str]:
        """The numbers of heads measured; orders with the same numbers are listed together."""
        alike: dict[tuple[int, ...], list[str]] = {tuple(self.plain.removed[1:]): [PLAIN]}
        for name, curves in (self.elsewhere | self.redrawn | self.recovered).items():
            alike.setdefault(tuple(curves.removed[1:]), []).append(name)
        for points, names in alike.items():
            which = "" if PLAIN in names else f" for {' and '.join(names)}"
            yield f"after {', '.join(map(str, points))}{which}"

    def _curves(self, end: str) -> dict[str, Curves]:
        return self.recovered if end == RECOVERED else self.redrawn

    def _elbows(self, ends: Sequence[str]) -> Iterator[list[str]]:
        for name in self.plain.per_text:
            elbows = [str(self.plain.elbow(name, self.allowed))]
            for end in ends:
                curves = self._curves(end).get(f"{name}{end}")
                elbows.append(str(curves.elbow(f"{name}{end}", self.allowed)) if curves else "")
            yield [name, *elbows]
        for name, curves in self.elsewhere.items():
            yield [name, str(curves.elbow(name, self.allowed)), *[""] * len(ends)]

    def _table(self, cell: Callable[[Curves, str, int], str]) -> str:
        """A row for each order, a column for each point that is not close to another."""
        shown = {int(n) for curves in self.recovered.values() for n in curves.removed[1:]}
        for point in map(int, self.plain.removed[1:]):
            if not any(n * 6 / 7 < point < n * 7 / 6 for n in shown):
                shown.add(point)
        points, rows = sorted(shown), []
        plain = dict.fromkeys(self.plain.per_text, self.plain)
        all_curves = plain | self.elsewhere | self.recovered
        for name, curves in all_curves.items():
            column = {int(heads): i for i, heads in enumerate(curves.removed)}
            cells = (cell(curves, name, column[p]) if p in column else "" for p in points)
            rows.append([name, *cells])
        return table([f"heads removed, of {self.plain.n_heads}", *map(str, points)], rows)


def part_of(curves: Curves, names: list[str], last: int) -> Curves:
    """The named orders of the curves, up to `last` heads."""
    upto = curves.removed <= last
    chosen = {name: curves.per_text[name][:, upto] for name in names}
    return replace(curves, removed=curves.removed[upto], per_text=chosen, score="", scores={})


def growth(curves: Curves, name: str, point: int) -> str:
    """The growth of the mean loss, with a bootstrap interval over texts."""
    lost = curves.per_text[name][:, point] - curves.per_text[name][:, 0]
    if len(lost) > 1:
        return mean_and_range(lost.mean(1), 3)
    low, high = np.quantile(bootstrap_means(lost.T), [0.025, 0.975])
    digits = 4 if curves.compares else 3
    mean = round(lost.mean(), digits) + 0.0  # a rounded −0 becomes 0
    return f"{mean:.{digits}f} ± {(high - low) / 2:.{digits}f}".replace("-", "−")


def percentile(curves: Curves, name: str, point: int) -> str:
    return f"{np.quantile(curves.per_text[name][:, point], 0.95, axis=1).mean():.3f}"


def score(curves: Curves, name: str, point: int) -> str:
    return mean_and_range(curves.scores[name][:, point], 3)


def mean_and_range(values: np.ndarray, digits: int) -> str:
    """The mean of several orders with their range; the value of a single order."""
    # Adding 0 makes a rounded −0 a 0.
    ends = (round(x, digits) + 0.0 for x in (values.mean(), values.min(), values.max()))
    mean, low, high = (f"{x:.{digits}f}".replace("-", "−") for x in ends)
    return mean if len(values) == 1 else f"{mean} ({low}–{high})"


def agreement(scores: dict[str, hw.Scores], method: str) -> Iterator[str]:
    """How much the orders of heads agree between texts, and between draws of the same texts."""
    first = {name: set(of.order()[:FIRST]) for name, of in scores.items()}
    rows = []
    for name, of in scores.items():
        again = [len(first[name] & set(order[:FIRST])) for order in of.redrawn_orders(100)]
        cells = []
        for other, another in scores.items():
            rank = spearmanr(of.importance, another.importance)[0]
            between = f"{len(first[name] & first[other])}, {rank:.2f}"
            cells.append(f"{np.mean(again):.1f}" if name == other else between)
        rows.append([CORPORA.get(name, name), *cells])
    yield (
        f"The number of the first {FIRST} heads to be removed by `{method}` that two corpora "
        "share, and the rank correlation of importance over all heads; on the diagonal the number "
        "that another draw of the same scored texts shares, in the mean of 100 draws:"
    )
    yield table(["scored on", *(row[0] for row in rows)], rows)
