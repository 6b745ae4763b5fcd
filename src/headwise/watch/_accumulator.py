"""Sums of statistics by site and text, which become totals when a text has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from jaxtyping import Float64

from headwise.models import Site
from headwise.tables import TextSums, Totals
from headwise.watch._eligible_rows import CallSums
from headwise.watch._positions import Positions

# The number of calls of a site that are added up together.
_TOGETHER = 64


@dataclass(frozen=True)
class _TextSums:
    """Sums over all calls on the same `M` texts.

    Attributes:
        parts: The number of rows, the sums over them, and the sums under even attention.
    """

    first_text: int
    parts: Float64[np.ndarray, "3 K M H"]
    maximum: Float64[np.ndarray, "K H"]

    @classmethod
    def of(cls, first_text: int, calls: Sequence[CallSums]) -> "_TextSums":
        each = torch.stack([x for call in calls for x in (call.count, call.total, call.even)])
        parts = each.view(len(calls), 3, *each.shape[1:]).sum(0)
        undefined = torch.stack([call.undefined for call in calls])
        maxima = torch.stack([call.maximum for call in calls]).double()
        maxima = maxima.masked_fill(undefined, torch.nan)
        return cls(first_text, parts.cpu().numpy(), np.fmax.reduce(maxima.cpu().numpy()))

    def __add__(self, more: "_TextSums") -> "_TextSums":
        """Add more rows of the same texts."""
        maximum = np.fmax(self.maximum, more.maximum)
        return replace(self, parts=self.parts + more.parts, maximum=maximum)

    def totals(self) -> Totals:
        """The totals of all statistics together, one head of one statistic after the other."""
        _, K, M, H = self.parts.shape
        count, total, even = self.parts.transpose(0, 2, 1, 3).reshape(3, M, K * H)
        return Totals.of_texts(total, count, self.maximum.ravel(), even)


class _SiteSums:
    """The sums of one site. Texts that may still continue are kept apart."""

    def __init__(self, per_text: bool) -> None:
        self._per_text = per_text
        self._names: tuple[str, ...] = ()
        self._calls: list[tuple[int, CallSums]] = []  # not added up yet
        self._closed: Totals | None = None
        self._by_text: list[_TextSums] = []
        self._open: _TextSums | None = None

    def add(self, first_text: int, sums: CallSums) -> None:
        self._calls.append((first_text, sums))
        if len(self._calls) >= _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """Add up the latest calls."""
        for first_text, calls in groupby(self._calls, key=lambda call: call[0]):
            same_texts = [sums for _, sums in calls]
            self._names = same_texts[0].names
            sums = _TextSums.of(first_text, same_texts)
            if self._open is not None and self._open.first_text == first_text:
                sums = self._open + sums
            elif self._open is not None:
                self._closed = self._with(self._open)
                self._by_text += [self._open] if self._per_text else []
            self._open = sums
        self._calls = []

    def totals(self) -> dict[str, Totals]:
        self._add_up()
        totals = self._closed if self._open is None else self._with(self._open)
        assert totals is not None  # a site is added with its first call
        H = len(totals.count) // max(1, len(self._names))
        return {
            name: totals.select(itemgetter(slice(row * H, (row + 1) * H)))
            for row, name in enumerate(self._names)
        }

    def by_text(self, n_texts: int) -> Float64[np.ndarray, "3 K texts H"]:
        """Count, total and even sums of all texts; zeros for texts without a call of the site."""
        self._add_up()
        sums = self._by_text if self._open is None else [*self._by_text, self._open]
        _, K, _, H = sums[0].parts.shape
        parts = np.zeros((3, K, n_texts, H))
        for text in sums:
            parts[:, :, text.first_text : text.first_text + text.parts.shape[2]] += text.parts
        return parts

    def _with(self, sums: _TextSums) -> Totals:
        return sums.totals() if self._closed is None else self._closed + sums.totals()


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
        if site not in self._sums:
            self._sums[site] = _SiteSums(self._per_text)
        self._sums[site].add(first_text, sums)
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
                name: replace(total, per_text=TextSums(*(by_text[site][:, row][:, counted])))
                for row, (name, total) in enumerate(totals[site].items())
            }
            for site in order
        }
