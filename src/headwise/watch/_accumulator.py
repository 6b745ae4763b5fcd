"""Sums of statistics by site and text, which become totals when a text has ended."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.models import Site
from headwise.tables import COLUMNS, TextSums, Totals
from headwise.watch._request import Request
from headwise.watch._row_sums import RowSums

# Texts of a site whose sums are kept apart before they are added up, on average.
_MOST = 256
FINISHED = -1  # in place of the number of a pass that can no longer fail


class _TextSums(NamedTuple):
    """The sums of a site over some texts of a pass, which stay on their device until they are read.

    Attributes:
        texts: Their numbers; a text may come again.
        parts: The number of rows, the sums over them, and the sums under uniform attention.
        highest: The largest values of `n` calls.
    """

    forward_pass: int
    texts: Int[np.ndarray, " N"]
    parts: Float[Tensor, "3 K N H"]
    highest: Float[Tensor, "K n H"]


def _by_text(sums: Sequence[_TextSums]) -> _TextSums:
    """Sums as one, each text once and in order. They can no longer be dropped."""
    parts = np.concatenate([each.parts.cpu().numpy() for each in sums], axis=2)
    highest = np.concatenate([each.highest.cpu().numpy() for each in sums], axis=1)
    numbers = np.concatenate([each.texts for each in sums])
    if (numbers[1:] > numbers[:-1]).all():  # as where every text is read in one pass
        texts, added = numbers, parts
    else:
        texts, which = np.unique(numbers, return_inverse=True)
        added = np.zeros((*parts.shape[:2], len(texts), parts.shape[3]))
        np.add.at(np.moveaxis(added, 2, 0), which, np.moveaxis(parts, 2, 0))
    # fmax: the largest value of a call without eligible rows is NaN.
    highest = np.fmax.reduce(highest, axis=1, keepdims=True)
    return _TextSums(FINISHED, texts, torch.from_numpy(added), torch.from_numpy(highest))


def _totals(sums: _TextSums, before: Totals | None) -> Totals:
    """The totals of all statistics, head by head of each, with those of earlier texts."""
    _, K, M, H = sums.parts.shape
    count, total, even = sums.parts.numpy().transpose(0, 2, 1, 3).reshape(3, M, K * H)
    totals = Totals.of_texts(total, count, sums.highest.numpy().ravel(), even)
    return totals if before is None else before + totals


class Accumulator:
    """Sums by site and text. Texts are numbered in the order in which they are read.

    A forward pass over a cache continues the texts of the pass before it. The sums of the current
    pass stay apart until the next one begins, since it may yet end in an exception.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.clear()

    def clear(self) -> None:
        """Begin again at zero."""
        self._open: dict[Site, list[_TextSums]] = {}  # of this pass, and of texts that may go on
        self._totals: dict[Site, Totals] = {}  # of all others
        self._ended: dict[Site, list[_TextSums]] = {}  # if they are kept by text, too
        self._pass = -1
        self._before: tuple[int, int, int, dict[str, tuple[int, int]]] = -1, 0, 0, {}
        self._first = self._next = 0
        self._texts_of: dict[Site, int] = {}  # the number of texts of each site in this pass
        self._read: dict[str, tuple[int, int]] = {}  # by stack: number of texts, last column
        self._n_texts = 0  # of the sums that are kept apart
        self._most = _MOST

    @property
    def is_full(self) -> bool:
        """Whether there are so many sums that those of ended texts should be added up."""
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
            entry = _TextSums(forward_pass, texts, parts, sums.highest[:, numbers])
            self._open.setdefault(site, []).append(entry)
            self._n_texts += len(texts)

    def drop(self, forward_pass: int) -> None:
        """Forget a pass, which has ended in an exception."""
        for site, sums in self._open.items():
            self._open[site] = [each for each in sums if each.forward_pass != forward_pass]
        if forward_pass == self._pass:
            self._pass, self._first, self._next, self._read = self._before

    def close(self) -> None:
        """Add up the texts that have ended: all their calls were added."""
        for site, sums in self._open.items():
            current = [each for each in sums if each.forward_pass == self._pass]
            finished = [each for each in sums if each.forward_pass != self._pass]
            if finished:
                ended, rest = _split(_by_text(finished), self._first)
                if len(ended.texts):
                    self._totals[site] = _totals(ended, self._totals.get(site))
                    if self._request.per_text:
                        self._ended.setdefault(site, []).append(ended)
                self._open[site] = [*([rest] if len(rest.texts) else []), *current]
        self._n_texts = sum(len(each.texts) for sums in self._open.values() for each in sums)
        self._most = 2 * self._n_texts + _MOST * len(self._open)  # a batch may be of many texts

    def totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, by stack and layer, and the totals of each statistic, all their
        heads side by side.
        """
        names, sums = (
            self._request.names,
            {s: _by_text(own) for s, own in self._open.items() if own},
        )
        sites = sorted({*sums, *self._totals}, key=lambda site: (site.stack, site.layer))
        if not names or not sites:
            return sites, {}
        of_sites = [
            _totals(sums[site], self._totals.get(site)) if site in sums else self._totals[site]
            for site in sites
        ]
        columns = [
            np.concatenate([getattr(each, name).reshape(len(names), -1) for each in of_sites], 1)
            for name in COLUMNS
        ]
        totals = {name: Totals(*(c[row] for c in columns)) for row, name in enumerate(names)}
        if not self._request.per_text:
            return sites, totals
        by_text = []
        for site in sites:
            own = [*self._ended.get(site, []), *([sums[site]] if site in sums else [])]
            _, K, _, H = own[0].parts.shape
            by_text.append(np.zeros((3, K, self._next, H)))  # some texts have no call of a site
            for each in own:
                by_text[-1][:, :, each.texts] += each.parts.numpy()
        parts = np.concatenate(by_text, 3)
        # A text that is only padding, or that no site counted, is dropped.
        counted = (parts[0] > 0).any((0, 2))
        return sites, {
            name: replace(totals[name], per_text=TextSums(*parts[:, row][:, counted]))
            for row, name in enumerate(names)
        }


def _split(sums: _TextSums, first: int) -> tuple[_TextSums, _TextSums]:
    """The sums of the texts before one, which have ended, and of the others."""
    n = int(np.searchsorted(sums.texts, first))
    ended = sums._replace(texts=sums.texts[:n], parts=sums.parts[:, :, :n])
    return ended, sums._replace(texts=sums.texts[n:], parts=sums.parts[:, :, n:])
