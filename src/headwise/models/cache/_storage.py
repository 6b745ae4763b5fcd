"""Storage for the keys and values of kv heads of one layer that keep the same tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Slots are allocated ahead: this share of those in use, and at least so many.
_AHEAD, _LEAST_AHEAD = 32, 64
# Slots that stay for tokens that assisted decoding may take back.
_RECORDED = 32


class KeysValues(NamedTuple):
    """Keys and values of some kv heads."""

    k: Float[Tensor, "B n S D"]
    v: Float[Tensor, "B n S Dv"]

    def map(self, function: Callable[[Tensor], Tensor]) -> "KeysValues":
        """The results for both."""
        return KeysValues(function(self.k), function(self.v))


class Entries(NamedTuple):
    """What the queries of one call may read of the kv heads of a group.

    Attributes:
        near: The keys of the last columns; None if one query reads slots in any order.
        start: The column of the first of them.
        far: The first tokens of each text, or the slots.
        columns: The columns of those, negative for slots without a key; None if the query may
            attend to all of them.
    """

    near: KeysValues | None
    start: int = 0
    far: KeysValues | None = None
    columns: Int[Tensor, "_ n"] | None = None


class HeadGroup:
    """The kv heads of a layer that keep the same tokens.

    Attributes:
        numbers: Their indices in the layer.
        length: The number of columns so far, padding included.
        is_recording: Whether tokens may be taken back that a window has passed.
    """

    def __init__(self, heads: Sequence[int]) -> None:
        self.numbers = tuple(heads)
        self.heads = torch.tensor(self.numbers, dtype=torch.long)
        self.length, self.is_recording = 0, False
        self._slots: KeysValues | None = None

    def append(self, k: Tensor, v: Tensor, first: Int[Tensor, " B"] | None) -> Entries:
        """Add the tokens of a call, and return what its queries may read.

        Args:
            first: The column of the first token of each text; None if no row is padded.
        """
        raise NotImplementedError

    def crop(self, n: int, first: Int[Tensor, " B"] | None) -> None:
        """Forget the last `n` tokens."""
        self.length -= n

    @property
    def nbytes(self) -> int:
        """The bytes of its storages."""
        return 0 if self._slots is None else sum(x.untyped_storage().nbytes() for x in self._slots)

    def select(self, index: Int[Tensor, " beams"]) -> None:
        """Keep these rows of the batch; a row may be repeated."""
        if self._slots is not None:
            self._slots = self._slots.map(lambda x: x.index_select(0, index.to(x.device)))

    def _of(self, k: Tensor, v: Tensor) -> KeysValues:
        self.heads = self.heads.to(k.device)
        return KeysValues(k, v).map(lambda x: x.detach().index_select(1, self.heads))

    def _reserve(self, new: KeysValues, slots: int, most: int | None = None) -> KeysValues:
        """Slots for this many tokens, with those in use copied if there were fewer."""
        old = self._slots
        if old is not None and old.k.shape[2] >= slots:
            return old
        ahead = slots + max(_LEAST_AHEAD, slots // _AHEAD)
        size = ahead if most is None else min(ahead, most)

        def grow(x: Tensor, before: Tensor | None) -> Tensor:
            # A tensor made in inference mode cannot be written outside of it later.
            with torch.inference_mode(False):
                larger = x.new_empty(*x.shape[:2], size, x.shape[3])
            if before is not None:
                larger[:, :, : before.shape[2]] = before
            return larger

        before = (None, None) if old is None else old
        self._slots = KeysValues(grow(new.k, before[0]), grow(new.v, before[1]))
        return self._slots


class FullGroup(HeadGroup):
    """Heads that keep every token, in the columns of the batch."""

    def append(self, k: Tensor, v: Tensor, first: Int[Tensor, " B"] | None) -> Entries:
        new, start = self._of(k, v), self.length
        self.length += k.shape[2]
        slots = self._reserve(new, self.length)
        for buffer, x in zip(slots, new, strict=True):
            buffer[:, :, start : self.length] = x
        return Entries(slots.map(lambda x: x[:, :, : self.length]))


class StreamingGroup(HeadGroup):
    """Heads that keep the first `sinks` tokens of each text and the last `window`.

    The token at position `p` of its text is in slot `p` while that is free, and later in slots
    after the sinks in turn, over the one that left the window. So slots are never moved, and
    padding takes none.
    """

    def __init__(self, heads: Sequence[int], sinks: int, window: int) -> None:
        super().__init__(heads)
        self.sinks, self.window = sinks, window
        self._ring = window  # slots after the sinks
        self._since = 0  # tokens since the last crop
        self._written = 0  # columns that were ever written, cropped ones included
        self._oldest = 0  # the first column after the sinks that is still there

    def append(self, k: Tensor, v: Tensor, first: Int[Tensor, " B"] | None) -> Entries:
        new, start, T = self._of(k, v), self.length, k.shape[2]
        past_start = max(0, start - self.window + 1)
        past = self._columns(past_start, start, first) if T > 1 and past_start < start else None
        self._make_room(T, first)
        slots = self._reserve(new, min(self.sinks + self._ring, start + T), self.sinks + self._ring)
        self.length += T
        self._write(slots, new, start, first)
        self._written = max(self._written, self.length)
        if self._written > self.sinks + self._ring:
            self._oldest = max(self._oldest, self._written - self._ring)
        if T == 1:
            n_slots = min(self.sinks + self._ring, self.length)
            sees_all = first is None and self._ring == self.window
            columns = None if sees_all else self.columns(n_slots, first, k.device)
            return Entries(None, 0, slots.map(lambda x: x[:, :, :n_slots]), columns)
        recent = new
        if past is not None:
            recent = KeysValues(*(torch.cat(pair, 2) for pair in zip(past, new, strict=True)))
        sinks = slots.map(lambda x: x[:, :, : self.sinks])
        columns = torch.arange(sinks.k.shape[2], device=k.device)[None]
        columns = columns if first is None else columns + first.to(k.device)[:, None]
        columns = columns.masked_fill(columns >= self.length, -1)
        return Entries(recent, past_start, sinks, columns)

    def can_crop(self, n: int) -> bool:
        """Whether the last `n` tokens can be taken back: what came before them is still there."""
        return max(0, self.length - n - self.window + 1) >= self._oldest

    def crop(self, n: int, first: Int[Tensor, " B"] | None) -> None:
        super().crop(n, first)
        self._since = 0
        if self._ring > self.window + _RECORDED:
            self._move(self.window + _RECORDED, first)

    def _make_room(self, T: int, first: Tensor | None) -> None:
        """Keep tokens that left the window, while they may be needed again."""
        self._since += T
        if self.is_recording and self._ring < self.window + self._since:
            self._move(self.window + self._since + _RECORDED, first)

    def _slot_of(self, positions: Int[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
        later = self.sinks + (positions - self.sinks) % self._ring
        return torch.where(positions < self.sinks, positions, later)

    def _write(self, slots: KeysValues, new: KeysValues, start: int, first: Tensor | None) -> None:
        """Write the tokens that stay: those of several calls of one size are the same slots."""
        device, stop = new.k.device, self.length
        columns = torch.arange(start, stop, device=device)
        # One token is 31 µs in place of 156 for each layer, which is what decoding asks for.
        if first is None and stop - start == 1:
            slot = start if start < self.sinks else self.sinks + (start - self.sinks) % self._ring
            for buffer, x in zip(slots, new, strict=True):
                buffer[:, :, slot] = x[:, :, 0]
            return
        offsets = [0] if first is None else first.tolist()
        for row, offset in enumerate(offsets):
            rows = slice(None) if first is None else slice(row, row + 1)
            positions = columns - offset
            stays = (positions < self.sinks) | (columns >= stop - self._ring)
            index = torch.nonzero(stays & (positions >= 0)).flatten()
            places = self._slot_of(positions[index])
            for buffer, x in zip(slots, new, strict=True):
                buffer[rows].index_copy_(2, places, x[rows].index_select(2, index))

    def columns(
        self, n_slots: int, first: Tensor | None, device: torch.device
    ) -> Int[Tensor, "_ n"]:
        """The column of the token in each slot; negative for a slot without one."""
        positions = self._positions(n_slots, first, device)
        if first is None:
            return positions
        return torch.where(positions < 0, -1, positions + first.to(device)[:, None])

    def _positions(
        self, n_slots: int, first: Tensor | None, device: torch.device
    ) -> Int[Tensor, "#B n"]:
        """The position of the token in each slot; negative for a slot without one."""
        slot = torch.arange(n_slots, device=device)[None]
        start = slot.new_zeros(1, 1) if first is None else first.to(device)[:, None]
        last = self.length - 1 - start
        latest = last - (last - slot) % self._ring
        is_gone = (latest < self.sinks) | (latest + start < self._oldest)
        sinks = slot.masked_fill(slot > last, -1)
        return torch.where(slot < self.sinks, sinks, latest.masked_fill(is_gone, -1))

    def _columns(self, start: int, stop: int, first: Tensor | None) -> KeysValues:
        """Copies of the keys of some columns; those of padding may be anything."""
        slots = self._slots
        assert slots is not None
        columns = torch.arange(start, stop, device=slots.k.device)
        if first is None:
            index = self._slot_of(columns)
            return slots.map(lambda x: x.index_select(2, index))
        places = self._slot_of((columns - first.to(columns)[:, None]).clamp(min=0))
        places = places.clamp(max=slots.k.shape[2] - 1)[:, None, :, None]
        return slots.map(lambda x: x.gather(2, places.expand(*x.shape[:2], -1, x.shape[3])))

    def _move(self, ring: int, first: Tensor | None) -> None:
        """Change how many slots are used in turn; each token gets the slot that belongs to it."""
        slots, n_slots = self._slots, min(self.sinks + self._ring, self.length)
        if slots is None or n_slots == 0:
            self._ring = ring
            return
        if self._written > self.sinks + ring:
            self._oldest = max(self._oldest, self._written - ring)
        positions = self._positions(n_slots, first, slots.k.device)
        self._ring, self._slots = ring, None
        moved = self._reserve(slots, min(self.sinks + ring, self.length), self.sinks + ring)
        for row, in_row in enumerate(positions):
            rows = slice(None) if len(positions) == 1 else slice(row, row + 1)
            index = torch.nonzero(in_row >= 0).flatten()
            places = self._slot_of(in_row[index])
            for buffer, x in zip(moved, slots, strict=True):
                buffer[rows].index_copy_(2, places, x[rows].index_select(2, index))
