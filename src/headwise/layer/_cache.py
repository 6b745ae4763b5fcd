"""The key/value caches of incremental decoding: each new token costs one row of attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise._torch_private import can_read
from headwise.errors import ArgumentError, ShapeError
from headwise.masks import Mask, as_mask
from headwise.shapes import is_size

SlotPositions = Int[Tensor, "b S"]  # one row per text, or a single row for all texts


class CachedKeys(NamedTuple):
    """Cached keys and values in slots, in text order. Every text ends in the last slot."""

    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    positions: SlotPositions  # the token position of each slot; negative for an empty slot


class KVCache:
    """The cached keys and values of one layer: growing, preallocated, or a sliding window.

    Texts of different lengths are padded on the left, so that all of them end in the last slot
    and the next token of each goes into the same slot. A cache with a window keeps the last
    `window` tokens (the query's own included) and the first `n_sinks`; decoding with it equals
    one pass under the corresponding mask.

    Args:
        max_length: The number of tokens to allocate, padding included. None grows with each
            call. An allocation is written in place, which gradients cannot pass through.
        window: How many of the last tokens are kept, the query's own included: `n` here is a
            layer's `window=(n - 1, 0)`. None keeps all.
        n_sinks: How many of the first tokens are kept besides the window.
        left_padding: Per text, how many of the first tokens are padding.
    Raises:
        ArgumentError: a size is negative, `n_sinks` is used without a window, or a window
            together with `max_length`, which it does not need.
    Source:
        First tokens kept besides a window: Xiao et al. 2024 (arXiv:2309.17453). Positions here
        are those in the text; theirs are counted within the cache.
    """

    def __init__(
        self,
        max_length: int | None = None,
        *,
        window: int | None = None,
        n_sinks: int = 0,
        left_padding: Sequence[int] | Int[Tensor, " B"] | None = None,
    ) -> None:
        for name, size in (("max_length", max_length), ("window", window)):
            if size is not None and not is_size(size):
                raise ArgumentError(
                    f"KVCache: {name}={size!r}. Give a positive whole number, or None."
                )
        if n_sinks < 0 or (n_sinks and window is None):
            raise ArgumentError(
                f"KVCache: n_sinks={n_sinks}, window={window}. "
                f"Give a number from 0 on, and a window with sinks."
            )
        if window is not None and max_length is not None:
            raise ArgumentError(
                f"KVCache: max_length={max_length}, window={window}. "
                f"Give one of them: a window bounds the length by itself."
            )
        before = _as_integers(
            "KVCache: left_padding", [0] if left_padding is None else left_padding
        )
        if before.ndim != 1 or bool((before < 0).any()):
            raise ArgumentError(
                f"KVCache: left_padding={before.tolist()}. Give one number for each text."
            )
        self.max_length, self.window, self.n_sinks = max_length, window, n_sinks
        self._next = -before  # a single position where all texts agree
        self._ragged = left_padding is not None
        self._slots: CachedKeys | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._has_forgotten = False

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """The number of tokens cached so far per text; a single number where all texts agree."""
        return self._next.clamp(min=0)

    def __len__(self) -> int:
        """The number of slots in use."""
        return 0 if self._slots is None else self._slots.positions.shape[1]

    def positions(self, n_tokens: int, device: torch.device | str = "cpu") -> Int[Tensor, "b T"]:
        """The positions of the next tokens in their texts; negative for padding."""
        return self._next.to(device)[:, None] + torch.arange(n_tokens, device=device)

    def append(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> CachedKeys:
        """Add keys and values, and return all that the queries of these tokens may attend to.

        Raises:
            ShapeError: the sizes differ from those of the cached tensors, or the cache is full.
            ArgumentError: dtype or device differ, or gradients would pass through an allocation.
        """
        self.check(k, v)
        cached = self.join(k, v)
        self.keep(cached)
        return cached

    def join(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> CachedKeys:
        """What `append` returns, for tensors that passed `check`; the cache stays unchanged."""
        positions = self.positions(k.shape[2], k.device)
        if self._slots is not None:
            positions = torch.cat((self._slots.positions, positions), dim=1)
        if self.max_length is not None:
            # In place, but into slots that come into use only with `keep`.
            return CachedKeys(*self._fill(k, v, len(self)), positions)
        if self._slots is not None:
            return CachedKeys(
                torch.cat((self._slots.k, k), 2), torch.cat((self._slots.v, v), 2), positions
            )
        return CachedKeys(k, v, positions)

    def keep(self, cached: CachedKeys) -> None:
        """Store what `join` returned."""
        self._next = self._next.to(cached.positions.device) + cached.positions.shape[1] - len(self)
        self._slots = self._forget(cached)

    def visible(self, cached: CachedKeys, query_at: Int[Tensor, "b T"]) -> Mask | None:
        """The mask of cached keys for these queries, without causality; None if all are visible."""
        positions = cached.positions[:, None]  # b 1 S
        if self.window is None:
            return as_mask((positions >= 0)[:, None]) if self._ragged else None
        near = positions > query_at[..., None] - self.window
        return as_mask(((positions >= 0) & (near | (positions < self.n_sinks)))[:, None])

    def crop(self, lengths: int | Sequence[int] | Int[Tensor, " B"]) -> None:
        """Truncate each text to its first tokens; a shorter text is kept whole.

        As many slots stay in use as the longest text has tokens. To decode prompts padded on the
        right, run them as they are and crop the cache to the lengths of the texts.

        Args:
            lengths: The number of tokens to keep, one for all texts or one per text.
        Raises:
            ArgumentError: a length is negative or no whole number, or the window has already
                dropped the tokens.
            ShapeError: there are lengths for another number of texts.
        """
        lengths = _as_integers("KVCache.crop: lengths", lengths).to(self._next.device).reshape(-1)
        if bool((lengths < 0).any()):
            raise ArgumentError(f"KVCache.crop: {lengths.tolist()}. Give no negative length.")
        if self._slots is None:
            return
        if len(lengths) not in (1, len(self._slots.k)):
            raise ShapeError(
                f"KVCache.crop: {len(lengths)} lengths for {len(self._slots.k)} texts. "
                f"Give one for each text, or one number for all."
            )
        surplus = (self._next - lengths).clamp(min=0)
        if self._has_forgotten and not bool(surplus.any()):
            return
        if self._has_forgotten:
            raise ArgumentError(
                f"KVCache.crop: to {lengths.tolist()}, but the cache has dropped all but the "
                f"last window={self.window} tokens. Run the text again."
            )
        self._next = self._next - surplus
        n_slots = int(self._next.max().clamp(min=0))
        self._ragged = bool((self._next != n_slots).any())
        slots = torch.arange(n_slots, device=surplus.device)
        positions = self._next[:, None] + slots - n_slots
        moved = len(self) - n_slots - surplus  # by how many slots each text moves
        if bool(moved.any()):  # every text must end in the last slot again
            self._store(_gather(self._slots, slots + moved[:, None]), positions)
        else:
            self._slots = CachedKeys(
                self._slots.k[:, :, :n_slots], self._slots.v[:, :, :n_slots], positions
            )

    def reorder(self, index: Sequence[int] | Int[Tensor, " beams"]) -> None:
        """Select texts of the batch, such as the surviving beams; a text may be repeated.

        Raises:
            ArgumentError: an index is out of range. Indices on a GPU are not checked, since that
                would synchronize.
        """
        index = _as_integers("KVCache.reorder: index", index)
        n_texts = len(self._next) if self._slots is None else len(self._slots.k)
        known = self._slots is not None or n_texts > 1
        wrong = can_read(index) and bool(((index < 0) | (index >= n_texts)).any())
        if index.ndim != 1 or (known and wrong):
            raise ArgumentError(
                f"KVCache.reorder: index={index.tolist()} of {n_texts} texts. "
                f"Give a list of numbers from 0 to {n_texts - 1}."
            )
        if len(self._next) > 1:
            self._next = self._next.index_select(0, index.to(self._next.device))
        if self._slots is not None:
            k, v, positions = self._slots
            index = index.to(k.device)
            self._buffers = None
            self._store(
                (k.index_select(0, index), v.index_select(0, index)),
                positions if len(positions) == 1 else positions.index_select(0, index),
            )

    def _store(self, keys_values: tuple[Tensor, Tensor], positions: Tensor) -> None:
        """Store keys and values, copied into the allocation if there is one."""
        k, v = keys_values if self.max_length is None else self._fill(*keys_values, 0)
        self._slots = CachedKeys(k, v, positions)

    def _fill(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write into the allocation, made on first use, and return views of its used part."""
        if self._buffers is None or self._slots is None:
            self._buffers = self._allocate(k), self._allocate(v)
        stop = start + k.shape[2]
        for buffer, new in zip(self._buffers, (k, v), strict=True):
            buffer[:, :, start:stop] = new
        return self._buffers[0][:, :, :stop], self._buffers[1][:, :, :stop]

    def _allocate(self, like: Tensor) -> Tensor:
        shape = *like.shape[:2], self.max_length or 0, like.shape[3]
        # A tensor made in inference mode cannot be written outside of it later.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _forget(self, cached: CachedKeys) -> CachedKeys:
        """The last `window` slots, preceded by one slot per sink."""
        n_old = 0 if self.window is None else cached.positions.shape[1] - self.window
        if n_old <= self.n_sinks:
            return cached
        self._has_forgotten = True
        sinks = torch.arange(self.n_sinks, device=cached.positions.device)
        is_sink = cached.positions[:, :n_old, None] == sinks  # b old sinks
        slots = torch.arange(n_old, cached.positions.shape[1], device=cached.positions.device)
        slots = torch.cat((is_sink.byte().argmax(1), slots.expand(len(is_sink), -1)), dim=1)
        positions = cached.positions.gather(1, slots)
        positions[:, : self.n_sinks].masked_fill_(~is_sink.any(1), -1)
        return CachedKeys(*_gather(cached, slots), positions)

    def check(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> None:
        """Raise the errors of `append` for tensors that it cannot add."""
        n_after, n_texts = len(self) + k.shape[2], len(self._next)
        if self.max_length is not None and n_after > self.max_length:
            raise ShapeError(
                f"KVCache: {k.shape[2]} tokens after {len(self)} do not fit "
                f"max_length={self.max_length}. Raise it, or use a window."
            )
        if n_texts not in (1, len(k)):
            raise ShapeError(
                f"KVCache: {len(k)} texts, but the cache holds {n_texts}. Keep the batch size."
            )
        if self.max_length is not None and torch.is_grad_enabled() and k.requires_grad:
            raise ArgumentError(
                f"KVCache: max_length={self.max_length} is written in place, which gradients "
                f"cannot pass through. Decode under torch.no_grad(), or let the cache grow."
            )
        for name, old, new in zip("kv", self._slots or (), (k, v), strict=False):
            if (old.shape[:2], old.shape[3]) != (new.shape[:2], new.shape[3]):
                raise ShapeError(
                    f"KVCache: {name} {tuple(new.shape)} after {tuple(old.shape)}. "
                    f"Keep batch, heads and width; a cache belongs to one layer and batch."
                )
            if (old.dtype, old.device) != (new.dtype, new.device):
                raise ArgumentError(
                    f"KVCache: {name} {new.dtype} on {new.device} after {old.dtype} on "
                    f"{old.device}. Bring them to one dtype and device."
                )


def _as_integers(argument: str, values: int | Sequence[int] | Tensor) -> Tensor:
    """Integers as a tensor; booleans and floats are refused."""
    numbers = torch.as_tensor(values)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise ArgumentError(
            f"{argument} {numbers.tolist()} are {numbers.dtype}. Give whole numbers."
        )
    return numbers


def _gather(cached: CachedKeys, slots: SlotPositions) -> tuple[Tensor, Tensor]:
    """Copies of some slots of each text. A slot before the first may hold anything."""
    slots = slots.clamp(min=0)[:, None, :, None]
    return torch.take_along_dim(cached.k, slots, 2), torch.take_along_dim(cached.v, slots, 2)
