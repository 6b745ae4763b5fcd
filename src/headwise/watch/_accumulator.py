"""Sums of statistics by site and text, which become totals when a text has ended."""

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from headwise.models import Site
from headwise.tables import TextSums, Totals
from headwise.watch._request import Request
from headwise.watch._row_sums import CallRows, sum_rows
from headwise.watch._short_calls import ShortCall
from headwise.watch.layout import Positions

# Calls are added up together: at most so many calls, or so many rows.
_CALLS, _ROWS = 512, 1 << 15


@dataclass(frozen=True)
class _TextSums:
    """Sums over calls on `M` texts in a row.

    Attributes:
        parts: The number of rows, the sums over them, and the sums under even attention.
    """

    first: int
    parts: Float64[np.ndarray, "3 K M H"]

    @classmethod
    def of(cls, firsts: Sequence[int], each: Float64[np.ndarray, "3 K n M H"]) -> "_TextSums":
        """The sums of `n` calls on as many texts, from the number of the first text of each."""
        _, K, n, M, H = each.shape
        numbers = np.array(firsts)[:, None] + np.arange(M)
        parts, first = each.reshape(3, K, n * M, H), min(firsts)
        if (numbers.ravel() == np.arange(first, first + n * M)).all():
            return cls(first, parts)
        sums = np.zeros((3, K, max(firsts) + M - first, H))
        by_text, of_calls = np.moveaxis(sums, 2, 0), np.moveaxis(parts, 2, 0)
        np.add.at(by_text, numbers.ravel() - first, of_calls)  # texts may come again
        return cls(first, sums)

    @property
    def stop(self) -> int:
        """One past the last text."""
        return self.first + self.parts.shape[2]

    def split(self, text: int) -> "tuple[_TextSums, _TextSums]":
        """The texts before one, and the others."""
        before = min(max(0, text - self.first), self.parts.shape[2])
        after = _TextSums(self.first + before, self.parts[:, :, before:])
        return _TextSums(self.first, self.parts[:, :, :before]), after

    def __add__(self, more: "_TextSums") -> "_TextSums":
        """The sums of both, over all texts from the first to the last."""
        first, stop = min(self.first, more.first), max(self.stop, more.stop)
        parts = np.zeros((*more.parts.shape[:2], stop - first, more.parts.shape[3]))
        for sums in (self, more):
            parts[:, :, sums.first - first : sums.stop - first] += sums.parts
        return _TextSums(first, parts)

    def totals(self, maximum: Float64[np.ndarray, " N"]) -> Totals:
        """The totals of all statistics together, one head of one statistic after the other."""
        _, K, M, H = self.parts.shape
        count, total, even = self.parts.transpose(0, 2, 1, 3).reshape(3, M, K * H)
        return Totals.of_texts(total, count, maximum, even)


class _SiteSums:
    """The sums of one site. Texts that may still continue are kept apart."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._maximum: Float64[np.ndarray, " N"] | None = None
        self._closed: Totals | None = None
        self._by_text: list[_TextSums] = []
        self._open: _TextSums | None = None

    def add(self, sums: _TextSums, highest: Float64[np.ndarray, "K H"]) -> None:
        """Add the sums of some calls, and the largest value of each statistic in them."""
        self._open = sums if self._open is None else self._open + sums
        values = highest.ravel()
        self._maximum = values if self._maximum is None else np.fmax(self._maximum, values)

    def close(self, open_from: int) -> None:
        """Close the texts before one: they have ended."""
        assert self._open is not None  # a site is added with its first call
        ended, self._open = self._open.split(open_from)
        if ended.parts.shape[2]:
            self._closed = self._with(ended)
            self._by_text += [ended] if self._request.per_text else []

    def totals(self) -> dict[str, Totals]:
        assert self._open is not None
        assert self._maximum is not None
        totals = replace(self._with(self._open), maximum=self._maximum)
        by_name = totals.split(self._open.parts.shape[3])
        return dict(zip(self._request.names, by_name, strict=True))

    def copy(self) -> "_SiteSums":
        """The same sums, to go back to."""
        same = copy(self)
        same._by_text = list(self._by_text)
        return same

    def by_text(self, n_texts: int) -> Float64[np.ndarray, "3 K texts H"]:
        """Count, total and even sums of all texts; zeros for texts without a call of the site."""
        assert self._open is not None
        _, K, _, H = self._open.parts.shape
        parts = np.zeros((3, K, n_texts, H))
        for sums in (*self._by_text, self._open):
            parts[:, :, sums.first : sums.stop] += sums.parts
        return parts

    def _with(self, sums: _TextSums) -> Totals:
        """The totals of these texts and of all that have ended, but for the maximum."""
        _, K, n_texts, H = sums.parts.shape
        if self._closed is not None and n_texts == 0:
            return self._closed
        totals = sums.totals(np.full(K * H, np.nan))
        return totals if self._closed is None else self._closed + totals


class _Waiting(NamedTuple):
    """A call that is not added up yet, and the number of its first text."""

    site: Site
    first_text: int
    call: CallRows | ShortCall


class Accumulator:
    """Sums by site and text. Texts are numbered in the order in which they are read.

    A forward pass over a cache continues the texts of the pass before it. The calls of the current
    pass stay apart until the next one begins, since it may yet end in an exception.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._waiting: list[_Waiting] = []  # calls that are not added up yet
        self._n_rows = 0
        self._sums: dict[Site, _SiteSums] = {}
        self._pass = -1
        self._n_finished = 0  # of the calls that wait, how many belong to earlier passes
        self._before: tuple[int, int, int, dict[str, tuple[int, int]]] = -1, 0, 0, {}
        self._sums_before: dict[Site, _SiteSums] | None = None  # None: as they are now
        self._first = self._next = 0
        self._texts_of: dict[Site, int] = {}  # the number of texts of each site in this pass
        self._read: dict[str, tuple[int, int]] = {}  # by stack: number of texts, last column

    def add(self, site: Site, forward_pass: int, call: CallRows | ShortCall) -> int:
        """Add a call, and return the number of its first text.

        Several calls of a site in one pass are calls on different texts.
        """
        positions = call.layout.positions
        stack = site.stack.removesuffix("cross").removesuffix(".")
        if forward_pass != self._pass:
            self._before = self._pass, self._first, self._next, dict(self._read)
            self._n_finished, self._sums_before = len(self._waiting), None
            self._pass, self._texts_of = forward_pass, {}
            if not self._continues(stack, positions):
                self._first, self._read = self._next, {}
        if not positions.is_cross:
            self._read[stack] = positions.n_texts, positions.end
        first_text = self._first + self._texts_of.get(site, 0)
        self._texts_of[site] = self._texts_of.get(site, 0) + positions.n_texts
        self._next = max(self._next, first_text + positions.n_texts)
        self._waiting.append(_Waiting(site, first_text, call))
        self._n_rows += call.n_rows
        if len(self._waiting) >= _CALLS or self._n_rows >= _ROWS:
            self._add_up()
        return first_text

    def drop(self, forward_pass: int) -> None:
        """Forget a pass, which has ended in an exception, if it is the current one."""
        if forward_pass != self._pass:
            return
        if self._sums_before is not None:
            self._sums = self._sums_before
        self._waiting, dropped = (
            self._waiting[: self._n_finished],
            self._waiting[self._n_finished :],
        )
        self._n_rows -= sum(waiting.call.n_rows for waiting in dropped)
        self._pass, self._first, self._next, self._read = self._before

    def _add_up(self) -> None:
        """Add up the calls that wait."""
        finished, current = self._waiting[: self._n_finished], self._waiting[self._n_finished :]
        self._add_together(finished)
        if self._sums_before is None:
            self._sums_before = {site: sums.copy() for site, sums in self._sums.items()}
        self._add_together(current)
        self._waiting, self._n_rows, self._n_finished = [], 0, 0
        for waiting in (*finished, *current):
            if isinstance(waiting.call, ShortCall):
                waiting.call.batch.buffer.clear()
        for site_sums in self._sums.values():
            site_sums.close(self._first)

    def _add_together(self, calls: Sequence[_Waiting]) -> None:
        """Add up calls: those on the same texts together, of whatever site."""
        kinds: dict[Hashable, list[_Waiting]] = {}
        for waiting in calls:
            kinds.setdefault(waiting.call.kind(self._request), []).append(waiting)
        for alike in kinds.values():
            sums, highest = _sums_of([waiting.call for waiting in alike], self._request)
            numbers: dict[Site, list[int]] = {}
            for number, waiting in enumerate(alike):
                numbers.setdefault(waiting.site, []).append(number)
            for site, own in numbers.items():
                texts = _TextSums.of([alike[number].first_text for number in own], sums[:, :, own])
                if site not in self._sums:
                    self._sums[site] = _SiteSums(self._request)
                self._sums[site].add(texts, highest[:, own].max(1))

    def _continues(self, stack: str, positions: Positions) -> bool:
        """Whether a pass continues the texts of the pass before it."""
        if stack in self._read:
            texts, end = self._read[stack]
            return texts == positions.n_texts and 0 < end <= positions.begin
        # An encoder that ran by itself has read the source side of the same texts.
        return any(texts == positions.n_texts for texts, _ in self._read.values())

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of every site, ordered by stack and layer."""
        self._add_up()
        order = sorted(self._sums, key=lambda site: (site.stack, site.layer))
        totals = {site: self._sums[site].totals() for site in order}
        if not self._request.per_text:
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


def _sums_of(
    calls: Sequence[CallRows | ShortCall], request: Request
) -> tuple[Float64[np.ndarray, "3 K n M H"], Float64[np.ndarray, "K n H"]]:
    """The sums of calls of one kind by text, and the largest values; see `sum_rows`."""
    if isinstance(calls[0], ShortCall):
        numbers = [call.number for call in calls if isinstance(call, ShortCall)]
        sums, highest = sum_rows([calls[0].batch.rows()], request)
        return sums[:, :, numbers].numpy(), highest[:, numbers].numpy()
    rows = [call for call in calls if isinstance(call, CallRows)]
    sums, highest = sum_rows(rows, request)
    return sums.cpu().numpy(), highest.cpu().numpy()
