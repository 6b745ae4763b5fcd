"""Storage for the keys and values of kv heads of one layer that keep the same tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Slots for all tokens are allocated ahead: this share of those in use, and at least so many.
_AHEAD, _LEAST_AHEAD = 32, 64
# Tokens before a window that stay for further crops of assisted decoding.
_RECORDED = 32


class KeysValues(NamedTuple):
    """Keys and values of some kv heads."""

    k: Float[Tensor, "B n S D"]
    v: Float[Tensor, "B n S Dv"]

    def map(self, function: Callable[[Tensor], Tensor]) -> "KeysValues":
        """The results for both."""
        return KeysValues(function(self.k), function(self.v))

    def slice(self, start: int | None, stop: int | None = None) -> "KeysValues":
        """Those of some tokens."""
        return self.map(lambda x: x[:, :, start:stop])

    def followed_by(self, other: "KeysValues") -> "KeysValues":
        """These and other ones as one text."""
        return KeysValues(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))


class Entries(NamedTuple):
    """What the queries of one call may read of the kv heads of a group.

    Attributes:
        near: The keys of the last columns.
        start: The column of the first of them.
        far: The first tokens of each text; None if the queries read what the cache of
            transformers would give them.
        columns: The columns of those; negative for tokens that are not there yet.
    """

    near: KeysValues
    start: int = 0
    far: KeysValues | None = None
    columns: Int[Tensor, "_ n"] | None = None


class HeadGroup:
    """The kv heads of a layer that keep the same tokens: all, or the first and the latest.

    Attributes:
        numbers: Their indices in the layer.
        sinks: How many of the first tokens of each text they keep besides a window; None if the
            window is the model's own, so that they keep what the cache of transformers keeps.
        window: How many of the last tokens they keep, a query's own included; None for all.
        length: The number of columns so far, padding included.
        is_recording: Whether tokens may be taken back that a window has passed.
    """

    def __init__(self, heads: Sequence[int], sinks: int | None, window: int | None) -> None:
        self.numbers, self.sinks, self.window = tuple(heads), sinks, window
        self.heads = torch.tensor(self.numbers, dtype=torch.long)
        self.length, self.is_recording = 0, False
        self._start = 0  # the column of the first of the latest tokens
        self._latest: KeysValues | None = None
        self._first: KeysValues | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What it stores."""
        return [x for kept in (self._first, self._latest) if kept is not None for x in kept]

    def append(self, k: Tensor, v: Tensor, first: Int[Tensor, " B"] | None) -> Entries:
        """Add the tokens of a call, and return what its queries may read.

        Args:
            first: The column of the first token of each text; None if no row is padded.
        """
        self.heads = self.heads.to(k.device)
        new = KeysValues(k, v).map(lambda x: x.detach().index_select(1, self.heads))
        self.length += k.shape[2]
        if self.window is None:
            return Entries(self._write(new))
        recent = new if self._latest is None else self._latest.followed_by(new)
        start, self._latest = self._start, recent
        if not self.is_recording:
            # One token more than a query needs, so that the last one can be taken back.
            self._keep_latest(self.window)
        if self.sinks is None:
            # The model's mask need not hide more: Moshi's prefill sees beyond its window.
            surplus = max(0, self.length - k.shape[2] - self.window + 1 - start)
            return Entries(recent.slice(surplus), start + surplus)
        starts = torch.zeros(1, 1, dtype=torch.long) if first is None else first[:, None]
        columns = (starts + torch.arange(self.sinks, device=starts.device)).to(k.device)
        if self._first is None or first is not None or self.length - k.shape[2] < self.sinks:
            self._first = self._with_first(new, columns)
        return Entries(recent, start, self._first, columns.masked_fill(columns >= self.length, -1))

    def can_crop(self, n: int) -> bool:
        """Whether the last `n` tokens can be taken back: what came before them is still there."""
        if self.window is None or self._start <= (self.sinks or 0):
            return True
        return self.length - n - self.window + 1 >= self._start

    def crop(self, n: int) -> None:
        """Forget the last `n` tokens."""
        self.length -= n
        if self.window is not None and self._latest is not None:
            self._latest = self._latest.slice(0, self.length - self._start)
            self._keep_latest(self.window + _RECORDED)

    def select(self, index: Int[Tensor, " beams"]) -> None:
        """Keep these rows of the batch; a row may be repeated."""

        def rows(kept: KeysValues | None) -> KeysValues | None:
            return kept and kept.map(lambda x: x.index_select(0, index.to(x.device)))

        self._first, self._latest = rows(self._first), rows(self._latest)

    def _write(self, new: KeysValues) -> KeysValues:
        """Write into slots that are allocated ahead, so that a token does not copy all others."""
        start, slots = self.length - new.k.shape[2], self._latest
        if slots is None or slots.k.shape[2] < self.length:
            size = self.length + max(_LEAST_AHEAD, self.length // _AHEAD)
            # A tensor made in inference mode cannot be written outside of it later.
            with torch.inference_mode(False):
                larger = new.map(lambda x: x.new_empty(*x.shape[:2], size, x.shape[3]))
            for whole, before in zip(larger, slots or (), strict=False):
                whole[:, :, :start] = before[:, :, :start]
            self._latest = slots = larger
        for whole, x in zip(slots, new, strict=True):
            whole[:, :, start : self.length] = x
        return slots.slice(0, self.length)

    def _with_first(self, new: KeysValues, columns: Int[Tensor, "_ n"]) -> KeysValues:
        """The first tokens of each text, with those among the new ones."""
        T = new.k.shape[2]
        at = columns - (self.length - T)
        is_new = ((at >= 0) & (at < T))[:, None, :, None]
        index = at.clamp(0, T - 1)[:, None, :, None]

        def taken(x: Tensor) -> Tensor:
            return x.gather(2, index.expand(*x.shape[:2], -1, x.shape[3]))

        latest = new.map(taken)
        if self._first is None:
            return latest
        pairs = zip(latest, self._first, strict=True)
        return KeysValues(*(torch.where(is_new, x, before) for x, before in pairs))

    def _keep_latest(self, n: int) -> None:
        """Drop all but the last `n` columns, and their memory unless it is that of one token."""
        latest, dropped = self._latest, self.length - self._start - n
        if latest is not None and dropped > 0:
            kept = latest.slice(dropped)
            self._latest = kept if dropped == 1 else kept.map(Tensor.clone)
            self._start += dropped
