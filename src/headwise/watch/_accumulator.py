"""The books of a watch: sums of texts, which become totals when a text has ended."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from headwise.models import Site
from headwise.tables import TextSums, Totals
from headwise.watch._positions import Positions


@dataclass(frozen=True)
class CallSums:
    """Sums of `K` statistics over the rows of each of `M` texts, for the heads of one site.

    `first` is the number of the first of these texts among all that were read.
    """

    names: tuple[str, ...]
    count: Float64[np.ndarray, "K M H"]
    total: Float64[np.ndarray, "K M H"]
    even: Float64[np.ndarray, "K M H"]
    maximum: Float64[np.ndarray, "K H"]
    first: int

    def __add__(self, other: "CallSums") -> "CallSums":
        """More rows of the same texts."""
        return replace(
            self,
            count=self.count + other.count,
            total=self.total + other.total,
            even=self.even + other.even,
            maximum=np.fmax(self.maximum, other.maximum),
        )

    def totals(self) -> dict[str, Totals]:
        parts = (self.total, self.count, self.maximum, self.even)
        each = zip(*parts, strict=True)
        return {name: Totals.of_texts(*one) for name, one in zip(self.names, each, strict=True)}


class _Account:
    """What was entered for one site; texts that may still go on stay apart."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._closed: dict[str, Totals] = {}
        self._kept: list[CallSums] = []
        self._open: CallSums | None = None

    def enter(self, sums: CallSums) -> None:
        if self._open is not None and self._open.first == sums.first:
            self._open = self._open + sums
            return
        if self._open is not None:
            self._closed = self._with(self._open)
            self._kept += [self._open] if self._keep else []
        self._open = sums

    def totals(self) -> dict[str, Totals]:
        return self._closed if self._open is None else self._with(self._open)

    def each(self) -> list[CallSums]:
        return self._kept if self._open is None else [*self._kept, self._open]

    def _with(self, sums: CallSums) -> dict[str, Totals]:
        more = sums.totals()
        return {n: self._closed[n] + more[n] for n in more} if self._closed else more


class Accumulator:
    """Sums by site and text. Numbers of texts go up in the order in which texts are read.

    A pass over a cache goes on with the texts of the pass before it.
    """

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._accounts: dict[Site, _Account] = {}
        self._pass = -1
        self._first = self._next = 0
        self._told: dict[Site, int] = {}  # how many texts each has told in this pass
        self._read: dict[str, tuple[int, int]] = {}  # in each stack: how many texts, how far

    def begin(self, site: Site, places: Positions, forward_pass: int) -> int:
        """The number of the first text of a call; a site's calls in one pass are other texts."""
        stack = site.stack.removesuffix("cross").removesuffix(".")
        if forward_pass != self._pass:
            self._pass, self._told = forward_pass, {}
            if not self._goes_on(stack, places):
                self._first, self._read = self._next, {}
        if not places.across:
            self._read[stack] = places.n_texts, places.ends
        first = self._first + self._told.get(site, 0)
        self._told[site] = self._told.get(site, 0) + places.n_texts
        self._next = max(self._next, first + places.n_texts)
        return first

    def _goes_on(self, stack: str, places: Positions) -> bool:
        """Whether a pass reads on in the texts of the pass before."""
        if stack in self._read:
            texts, read = self._read[stack]
            return texts == places.n_texts and 0 < read <= places.begins
        # An encoder that ran by itself has read the other side of the same texts.
        return any(texts == places.n_texts for texts, _ in self._read.values())

    def enter(self, site: Site, sums: CallSums) -> None:
        """Take in the sums of a call."""
        self._accounts.setdefault(site, _Account(self._keep)).enter(sums)

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of every site, in the order of their names."""
        order = sorted(self._accounts, key=lambda site: (site.stack, site.layer))
        totals = {site: self._accounts[site].totals() for site in order}
        if not self._keep:
            return totals
        each = {site: self._of_texts(site) for site in order}
        # What was only padding, or watched by nobody, is no text.
        seen = np.zeros(self._next, dtype=bool)
        for count, _, _ in each.values():
            seen |= (count > 0).any((0, 2))
        return {
            site: {
                name: replace(one, per_text=TextSums(*(part[at][seen] for part in each[site])))
                for at, (name, one) in enumerate(totals[site].items())
            }
            for site in order
        }

    def _of_texts(self, site: Site) -> tuple[Float64[np.ndarray, "K texts H"], ...]:
        """Count, total and even sums of all texts; zeros where the site was not called."""
        found = self._accounts[site].each()
        K, _, H = found[0].total.shape
        parts = tuple(np.zeros((K, self._next, H)) for _ in range(3))
        for sums in found:
            texts = slice(sums.first, sums.first + sums.total.shape[1])
            for part, more in zip(parts, (sums.count, sums.total, sums.even), strict=True):
                part[:, texts] += more
        return parts
