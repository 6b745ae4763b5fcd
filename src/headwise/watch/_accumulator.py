"""Sums of statistics by site and text, which become totals when a text has ended."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from headwise.models import Site
from headwise.tables import TextSums, Totals
from headwise.watch._positions import Positions


@dataclass(frozen=True)
class CallSums:
    """Sums of `K` statistics over the rows of each of `M` texts, for the heads of one site.

    Attributes:
        even: The sums under even attention.
    """

    names: tuple[str, ...]
    count: Float64[np.ndarray, "K M H"]
    total: Float64[np.ndarray, "K M H"]
    even: Float64[np.ndarray, "K M H"]
    maximum: Float64[np.ndarray, "K H"]

    def __add__(self, more: "CallSums") -> "CallSums":
        """Add more rows of the same texts."""
        return replace(
            self,
            count=self.count + more.count,
            total=self.total + more.total,
            even=self.even + more.even,
            maximum=np.fmax(self.maximum, more.maximum),
        )

    def totals(self) -> dict[str, Totals]:
        columns = zip(self.total, self.count, self.maximum, self.even, strict=True)
        return {
            name: Totals.of_texts(*sums) for name, sums in zip(self.names, columns, strict=True)
        }


class _SiteSums:
    """The sums of one site. Texts that may still continue are kept apart."""

    def __init__(self, per_text: bool) -> None:
        self._per_text = per_text
        self._closed: dict[str, Totals] = {}
        self._by_text: list[tuple[int, CallSums]] = []
        self._open: tuple[int, CallSums] | None = None

    def add(self, first_text: int, sums: CallSums) -> None:
        if self._open is not None and self._open[0] == first_text:
            sums = self._open[1] + sums
        elif self._open is not None:
            self._closed = self._with(self._open[1])
            self._by_text += [self._open] if self._per_text else []
        self._open = first_text, sums

    def totals(self) -> dict[str, Totals]:
        return self._closed if self._open is None else self._with(self._open[1])

    def by_text(self, n_texts: int) -> tuple[Float64[np.ndarray, "K texts H"], ...]:
        """Count, total and even sums of all texts; zeros for texts without a call of the site."""
        calls = self._by_text if self._open is None else [*self._by_text, self._open]
        K, _, H = calls[0][1].total.shape
        count, total, even = (np.zeros((K, n_texts, H)) for _ in range(3))
        for first_text, sums in calls:
            texts = slice(first_text, first_text + sums.total.shape[1])
            count[:, texts] += sums.count
            total[:, texts] += sums.total
            even[:, texts] += sums.even
        return count, total, even

    def _with(self, sums: CallSums) -> dict[str, Totals]:
        new = sums.totals()
        return {name: self._closed[name] + new[name] for name in new} if self._closed else new


class Accumulator:
    """Sums by site and text. Texts are numbered in the order in which they are read.

    A forward pass over a cache continues the texts of the pass before it.
    """

    def __init__(self, per_text: bool) -> None:
        self._per_text = per_text
        self._sums: dict[Site, _SiteSums] = {}
        self._pass = -1
        self._first = self._next = 0
        self._texts_of: dict[Site, int] = {}  # the number of texts of each site in this pass
        self._read: dict[str, tuple[int, int]] = {}  # by stack: number of texts, last column

    def add(self, site: Site, positions: Positions, forward_pass: int, sums: CallSums) -> int:
        """Add the sums of a call, and return the number of its first text.

        Several calls of a site in one pass are calls on different texts.
        """
        stack = site.stack.removesuffix("cross").removesuffix(".")
        if forward_pass != self._pass:
            self._pass, self._texts_of = forward_pass, {}
            if not self._continues(stack, positions):
                self._first, self._read = self._next, {}
        if not positions.is_cross:
            self._read[stack] = positions.n_texts, positions.end
        first_text = self._first + self._texts_of.get(site, 0)
        self._texts_of[site] = self._texts_of.get(site, 0) + positions.n_texts
        self._next = max(self._next, first_text + positions.n_texts)
        self._sums.setdefault(site, _SiteSums(self._per_text)).add(first_text, sums)
        return first_text

    def _continues(self, stack: str, positions: Positions) -> bool:
        """Whether a pass continues the texts of the pass before it."""
        if stack in self._read:
            texts, end = self._read[stack]
            return texts == positions.n_texts and 0 < end <= positions.begin
        # An encoder that ran by itself has read the source side of the same texts.
        return any(texts == positions.n_texts for texts, _ in self._read.values())

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of every site, ordered by stack and layer."""
        order = sorted(self._sums, key=lambda site: (site.stack, site.layer))
        totals = {site: self._sums[site].totals() for site in order}
        if not self._per_text:
            return totals
        by_text = {site: self._sums[site].by_text(self._next) for site in order}
        # A text that is only padding, or that no site counted, is dropped.
        counted = np.zeros(self._next, dtype=bool)
        for count, _, _ in by_text.values():
            counted |= (count > 0).any((0, 2))
        return {
            site: {
                name: replace(
                    total, per_text=TextSums(*(sums[row][counted] for sums in by_text[site]))
                )
                for row, (name, total) in enumerate(totals[site].items())
            }
            for site in order
        }
