"""Adds up the sums of passes by site and text, to totals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int

from headwise.capture import Site
from headwise.tables import COLUMNS, TextSums, Totals
from headwise.watch._request import Request
from headwise.watch._sums import RowSums

# The number of texts of a site whose sums are kept apart before they are added up.
_MOST = 256
# The numbers of some texts, of which one may come again, and their sums.
NumberedSums = tuple[Int[np.ndarray, " _"], RowSums]


class Accumulator:
    """Sums by site and text, of passes that have succeeded."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._open: dict[Site, list[NumberedSums]] = {}  # with texts that may go on
        self._n_texts: Counter[Site] = Counter()  # of these, since `close`
        self._totals: dict[Site, Totals] = {}  # of texts that have ended
        self._ended: dict[Site, list[NumberedSums]] = {}  # if they are kept by text, too

    def clear(self) -> None:
        """Begin again at zero."""
        for sums in (self._open, self._n_texts, self._totals, self._ended):
            sums.clear()

    def add(self, site: Site, sums: RowSums, first: Sequence[int]) -> None:
        """Add the sums of calls whose texts are numbered from each of `first` on."""
        M = sums.parts.shape[2]
        texts = np.add.outer(first, np.arange(M // len(first))).ravel()
        self._open.setdefault(site, []).append((texts, sums))
        self._n_texts[site] += M

    def is_full(self) -> bool:
        """Whether there are so many sums that those of ended texts should be added up."""
        # The first of them may be what `close` has left, of a batch of many texts.
        return any(
            own and self._n_texts[s] > _MOST + len(own[0][0]) for s, own in self._open.items()
        )

    def close(self, first: int) -> None:
        """Add up the texts that have ended: those before the first one of the latest pass.

        No call on them may wait.
        """
        for site, sums in self._open.items():
            if not sums:
                continue
            texts, added = _added(sums)
            n = int(np.searchsorted(texts, first))
            if n:
                ended = added._replace(parts=added.parts[:, :, :n])
                self._totals[site] = _totals(ended, self._totals.get(site))
                if self._request.per_text:
                    self._ended.setdefault(site, []).append((texts[:n], ended))
            rest = added._replace(parts=added.parts[:, :, n:])  # the largest value is that of all
            sums[:] = [(texts[n:], rest)] if n < len(texts) else []
        self._n_texts.clear()

    def totals(self, n_texts: int) -> tuple[list[Site], dict[str, Totals]]:
        """The sites that attended, by stack and layer, and the totals of each statistic, all their
        heads side by side. `close` is called before.
        """
        names, sums = self._request.names, {s: own[0][1] for s, own in self._open.items() if own}
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
        # Some texts have no call of a site.
        by_site = [np.zeros((3, len(names), n_texts, site.n_heads)) for site in sites]
        for site, parts in zip(sites, by_site, strict=True):
            for texts, own in (*self._ended.get(site, ()), *self._open.get(site, ())):
                parts[:, :, texts] += own.parts.numpy()
        parts = np.concatenate(by_site, 3)
        # A text that is only padding, or that no site counted, is dropped.
        counted = (parts[0] > 0).any((0, 2))
        return sites, {
            name: replace(totals[name], per_text=TextSums(*parts[:, row][:, counted]))
            for row, name in enumerate(names)
        }


def _added(sums: Sequence[NumberedSums]) -> NumberedSums:
    """Sums as one, each text once and in order."""
    numbers = np.concatenate([texts for texts, _ in sums])
    parts = torch.cat([own.parts for _, own in sums], 2).cpu()
    of_calls = torch.cat([own.highest for _, own in sums]).cpu().numpy()
    # fmax: the largest value of a call without eligible rows is NaN.
    highest = torch.from_numpy(np.fmax.reduce(of_calls, keepdims=True))
    if (numbers[1:] > numbers[:-1]).all():  # as where every text is read in one pass
        return numbers, RowSums(parts, highest)
    texts, which = np.unique(numbers, return_inverse=True)
    added = parts.new_zeros(*parts.shape[:2], len(texts), parts.shape[3])
    return texts, RowSums(added.index_add_(2, torch.from_numpy(which), parts), highest)


def _totals(sums: RowSums, before: Totals | None) -> Totals:
    """The totals of all statistics, head by head of each, with those of earlier texts."""
    count, total, uniform = sums.parts.transpose(1, 2).flatten(2).numpy()  # 3 M (K H)
    totals = Totals.of_texts(total, count, sums.highest.numpy().ravel(), uniform)
    return totals if before is None else before + totals
