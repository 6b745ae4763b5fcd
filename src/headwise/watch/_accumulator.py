"""Sums of statistics by site and text, which become totals when a text has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from headwise.models import Site
from headwise.tables import TextSums, Totals
from headwise.watch._request import Request
from headwise.watch._row_sums import RowSums

# Texts of a site whose sums are kept apart before they are added up, on average.
_MOST = 256
FINISHED = -1  # in place of the number of a pass that can no longer fail


class _Entry(NamedTuple):
    """The sums of a site over some texts of a pass, which stay on their device until they are read.

    Attributes:
        highest: The largest values of `n` calls.
    """

    forward_pass: int
    texts: Int[np.ndarray, " N"]
    parts: Float[Tensor, "3 K N H"]
    highest: Float[Tensor, "K n H"]


class _TextSums(NamedTuple):
    """The sums over some texts, in their order."""

    texts: Int[np.ndarray, " N"]
    parts: Float64[np.ndarray, "3 K N H"]
    highest: Float64[np.ndarray, "K H"]

    @classmethod
    def of(cls, entries: Sequence[_Entry]) -> "_TextSums":
        """The sums of some calls by text."""
        numbers = np.concatenate([entry.texts for entry in entries])
        parts = np.concatenate([entry.parts.cpu().numpy() for entry in entries], axis=2)
        # fmax: the largest value of a call without eligible rows is NaN.
        highest = np.concatenate([entry.highest.cpu().numpy() for entry in entries], axis=1)
        texts, which = np.unique(numbers, return_inverse=True)
        sums = parts
        if len(texts) < len(numbers):  # texts may come again
            sums = np.zeros((*parts.shape[:2], len(texts), parts.shape[3]))
            np.add.at(np.moveaxis(sums, 2, 0), which, np.moveaxis(parts, 2, 0))
        elif (numbers != texts).any():
            sums = parts[:, :, np.argsort(numbers)]
        return cls(texts, sums, np.fmax.reduce(highest, axis=1))

    def where(self, rows: Bool[np.ndarray, " N"]) -> "_TextSums":
        """The sums of some of the texts."""
        return _TextSums(self.texts[rows], self.parts[:, :, rows], self.highest)

    def added_to(self, totals: Totals | None) -> Totals:
        """Totals with those of these texts: all statistics together, head by head of each."""
        _, K, M, H = self.parts.shape
        count, total, even = self.parts.transpose(0, 2, 1, 3).reshape(3, M, K * H)
        own = Totals.of_texts(total, count, self.highest.ravel(), even)
        return own if totals is None else totals + own


class _SiteSums:
    """The sums of one site. Those of the current pass, and of texts that may still continue, are
    kept apart.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.entries: list[_Entry] = []
        self._closed: Totals | None = None
        self._by_text: list[_TextSums] = []

    def close(self, forward_pass: int, open_from: int) -> None:
        """Close the texts before one, which have ended, but for the sums of the current pass."""
        finished = [entry for entry in self.entries if entry.forward_pass != forward_pass]
        if not finished:
            return
        current = [entry for entry in self.entries if entry.forward_pass == forward_pass]
        sums = _TextSums.of(finished)
        ended = sums.texts < open_from
        if ended.any():
            closed = sums.where(ended)
            self._closed = closed.added_to(self._closed)
            self._by_text += [closed] if self._request.per_text else []
        rest = sums.where(~ended)
        arrays = map(torch.from_numpy, (rest.parts, rest.highest[:, None]))
        self.entries = [_Entry(FINISHED, rest.texts, *arrays), *current]
        if ended.all():
            self.entries = current

    def drop(self, forward_pass: int) -> bool:
        """Forget a pass, and say whether anything is left."""
        self.entries = [entry for entry in self.entries if entry.forward_pass != forward_pass]
        return bool(self.entries) or self._closed is not None

    def totals(self) -> dict[str, Totals]:
        totals, names = self._closed, self._request.names
        if self.entries:
            totals = _TextSums.of(self.entries).added_to(totals)
        if totals is None or not names:
            return {}
        return dict(zip(names, totals.split(len(totals.total) // len(names)), strict=True))

    def by_text(self, n_texts: int) -> Float64[np.ndarray, "3 K texts H"]:
        """Count, total and even sums of all texts; zeros for texts without a call of the site."""
        all_sums = [*self._by_text, *([_TextSums.of(self.entries)] if self.entries else [])]
        _, K, _, H = all_sums[0].parts.shape
        parts = np.zeros((3, K, n_texts, H))
        for sums in all_sums:
            parts[:, :, sums.texts] += sums.parts
        return parts


class Accumulator:
    """Sums by site and text. Texts are numbered in the order in which they are read.

    A forward pass over a cache continues the texts of the pass before it. The sums of the current
    pass stay apart until the next one begins, since it may yet end in an exception.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sums: dict[Site, _SiteSums] = {}
        self._pass = -1
        self._before: tuple[int, int, int, dict[str, tuple[int, int]]] = -1, 0, 0, {}
        self._first = self._next = 0
        self._texts_of: dict[Site, int] = {}  # the number of texts of each site in this pass
        self._read: dict[str, tuple[int, int]] = {}  # by stack: number of texts, last column
        self._n_texts = 0  # of the sums that are kept apart
        self._most = _MOST

    @property
    def is_full(self) -> bool:
        """Whether there are so many sums that those of ended texts should be closed."""
        return self._n_texts > self._most

    def number(self, site: Site, forward_pass: int, n_texts: int, columns: range | None) -> int:
        """The number of the first text of a call on `n_texts` texts.

        Several calls of a site in one pass are calls on different texts.

        Args:
            columns: Those of its queries in their texts; None if these are not among the keys.
        """
        stack = site.stack.removesuffix("cross").removesuffix(".")
        if forward_pass != self._pass:
            self._before = self._pass, self._first, self._next, dict(self._read)
            self._pass, self._texts_of = forward_pass, {}
            if not self._continues(stack, n_texts, columns.start if columns else 0):
                self._first, self._read = self._next, {}
        if columns is not None:
            self._read[stack] = n_texts, columns.stop
        of_pass = self._texts_of.get(site, 0)
        self._texts_of[site] = of_pass + n_texts
        self._next = max(self._next, self._first + of_pass + n_texts)
        return self._first + of_pass

    def _continues(self, stack: str, n_texts: int, begin: int) -> bool:
        """Whether a pass continues the texts of the pass before it."""
        if stack in self._read:
            texts, end = self._read[stack]
            return texts == n_texts and 0 < end <= begin
        # An encoder that ran by itself has read the source side of the same texts.
        return any(texts == n_texts for texts, _ in self._read.values())

    def add(
        self, sums: RowSums, calls: Mapping[tuple[Site, int], Sequence[tuple[int, int]]]
    ) -> None:
        """Add the sums of some calls.

        Args:
            calls: By site and forward pass, the number of each call and of its first text.
        """
        M = sums.parts.shape[3]
        for (site, forward_pass), own in calls.items():
            numbers = [number for number, _ in own]
            texts = (np.array([first for _, first in own])[:, None] + np.arange(M)).ravel()
            parts = sums.parts[:, :, numbers].flatten(2, 3)
            entry = _Entry(forward_pass, texts, parts, sums.highest[:, numbers])
            if site not in self._sums:
                self._sums[site] = _SiteSums(self._request)
            self._sums[site].entries.append(entry)
            self._n_texts += len(texts)

    def drop(self, forward_pass: int) -> None:
        """Forget a pass, which has ended in an exception."""
        for site, sums in list(self._sums.items()):
            if not sums.drop(forward_pass):
                del self._sums[site]
        if forward_pass == self._pass:
            self._pass, self._first, self._next, self._read = self._before

    def close(self) -> None:
        """Close texts that have ended, if there are many: all their calls were added."""
        if not self.is_full:
            return
        for sums in self._sums.values():
            sums.close(self._pass, self._first)
        entries = [entry for sums in self._sums.values() for entry in sums.entries]
        self._n_texts = sum(len(entry.texts) for entry in entries)
        self._most = 2 * self._n_texts + _MOST * len(self._sums)  # a batch may be of many texts

    def totals(self) -> dict[Site, dict[str, Totals]]:
        """The totals of every site, ordered by stack and layer."""
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
