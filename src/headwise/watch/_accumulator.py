"""Adds up the sums of passes by site and text, to totals."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.capture import Site
from headwise.tables import COLUMNS, TextSums, Totals
from headwise.watch._pass import TextNumbers
from headwise.watch._request import Request
from headwise.watch._sums import RowSums

# The average number of texts per site whose sums are kept apart before they are added up.
_MOST = 256


class _TextSums(NamedTuple):
    """The sums of a site over some texts, which stay on their device until they are read.

    Attributes:
        texts: Their numbers; a text may come again.
        parts: The number of rows, the sums over them, and the sums under uniform attention.
        highest: The largest values of `n` calls.
    """

    texts: Int[np.ndarray, " N"]
    parts: Float[Tensor, "3 K N H"]
    highest: Float[Tensor, "K n H"]


def _added(sums: Sequence[_TextSums]) -> _TextSums:
    """Sums as one, each text once and in order."""
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
    return _TextSums(texts, torch.from_numpy(added), torch.from_numpy(highest))


def _totals(sums: _TextSums, before: Totals | None) -> Totals:
    """The totals of all statistics, head by head of each, with those of earlier texts."""
    _, K, M, H = sums.parts.shape
    count, total, uniform = sums.parts.numpy().transpose(0, 2, 1, 3).reshape(3, M, K * H)
    totals = Totals.of_texts(total, count, sums.highest.numpy().ravel(), uniform)
    return totals if before is None else before + totals


class Accumulator:
    """Sums by site and text, of passes that have succeeded.

    Attributes:
        texts: The numbers of the texts of the latest of them.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.clear()

    def clear(self) -> None:
        """Begin again at zero."""
        self._open: dict[Site, tuple[_TextSums, ...]] = {}  # with texts that may go on
        self._totals: dict[Site, Totals] = {}  # of texts that have ended
        self._ended: dict[Site, tuple[_TextSums, ...]] = {}  # if they are kept by text, too
        self.texts = TextNumbers()
        self._n_texts = 0  # of the sums that are kept apart
        self._most = _MOST

    @property
    def is_full(self) -> bool:
        """Whether there are so many sums that those of ended texts should be added up."""
        return self._n_texts > self._most

    def add(self, sums: RowSums, calls: Mapping[Site, Sequence[tuple[int, int]]]) -> None:
        """Add the sums of some calls.

        Args:
            calls: By site, the number of each call and of its first text.
        """
        M = sums.parts.shape[3]
        for site, own in calls.items():
            numbers = [number for number, _ in own]
            texts = (np.array([first for _, first in own])[:, None] + np.arange(M)).ravel()
            parts = sums.parts[:, :, numbers].flatten(2, 3)
            entry = _TextSums(texts, parts, sums.highest[:, numbers])
            self._open[site] = (*self._open.get(site, ()), entry)
            self._n_texts += len(texts)

    def close(self) -> None:
        """Add up the texts that have ended: those before the first one of the latest pass."""
        for site, sums in self._open.items():
            if not sums:
                continue
            texts, parts, highest = _added(sums)
            n = int(np.searchsorted(texts, self.texts.first))
            if n:
                ended = _TextSums(texts[:n], parts[:, :, :n], highest)
                self._totals[site] = _totals(ended, self._totals.get(site))
                if self._request.per_text:
                    self._ended[site] = (*self._ended.get(site, ()), ended)
            rest = _TextSums(texts[n:], parts[:, :, n:], highest)
            self._open[site] = (rest,) if n < len(texts) else ()
        self._n_texts = sum(len(each.texts) for sums in self._open.values() for each in sums)
        self._most = 2 * self._n_texts + _MOST * len(self._open)  # a batch may be of many texts

    def totals(self) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, by stack and layer, and the totals of each statistic, all their
        heads side by side. `close` is called before.
        """
        # `close` has left one for each site with texts that may go on.
        names, sums = self._request.names, {s: own[0] for s, own in self._open.items() if own}
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
            own = [*self._ended.get(site, ()), *([sums[site]] if site in sums else [])]
            _, K, _, H = own[0].parts.shape
            by_text.append(
                np.zeros((3, K, self.texts.next, H))
            )  # some texts have no call of a site
            for each in own:
                by_text[-1][:, :, each.texts] += each.parts.numpy()
        parts = np.concatenate(by_text, 3)
        # A text that is only padding, or that no site counted, is dropped.
        counted = (parts[0] > 0).any((0, 2))
        return sites, {
            name: replace(totals[name], per_text=TextSums(*parts[:, row][:, counted]))
            for row, name in enumerate(names)
        }
