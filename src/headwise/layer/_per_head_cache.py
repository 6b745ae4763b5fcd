"""A key/value cache of our own layer whose kv heads keep different tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.layer._cache import CachedKeys, KVCache
from headwise.masks import Mask
from headwise.masks.tiles import Tile
from headwise.shapes import is_size


class PerHeadKVCache(KVCache):
    """The cached keys and values of one layer, where each kv head has a window of its own.

    It takes a layer of a `CachePlan` as plain data:
    `PerHeadKVCache(plan.windows[layer], n_sinks=plan.sinks)`. Heads that keep the same tokens are
    stored together, and what the others have dropped takes no memory between calls; while a call
    runs, its keys are laid out over all columns. Decoding equals one pass under the mask of each
    head.

    Args:
        windows: For each kv head how many of the last tokens it keeps, the query's own included;
            None for all tokens.
        n_sinks: How many of the first tokens heads with a window keep besides.
        left_padding: Per text, how many of the first tokens are padding.
    Raises:
        ArgumentError: there are no heads, a window is below 1, or a size is negative.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        n_sinks: int = 0,
        left_padding: Sequence[int] | Int[Tensor, " B"] | None = None,
    ) -> None:
        super().__init__(left_padding=left_padding)
        sizes = list(windows)
        if not sizes or not all(size is None or is_size(size) for size in sizes):
            raise ArgumentError(
                f"PerHeadKVCache: windows={sizes}. Give for each kv head a number of tokens from "
                f"1 on, or None."
            )
        self.windows, self.n_sinks = tuple(sizes), 0
        self._groups: list[tuple[Tensor, KVCache]] = []
        for size in dict.fromkeys(sizes):
            heads = torch.tensor([head for head, other in enumerate(sizes) if other == size])
            sinks = 0 if size is None else n_sinks
            group = KVCache(window=size, n_sinks=sinks, left_padding=left_padding)
            self._groups.append((heads, group))
        self._kept_sinks = n_sinks
        self._joined: list[CachedKeys] = []

    @property
    def nbytes(self) -> int:
        """The bytes of the cached keys and values."""
        slots = [group._slots for _, group in self._groups]
        return sum(x.nbytes for kept in slots if kept is not None for x in (kept.k, kept.v))

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """The number of tokens read so far per text; a single number where all texts agree."""
        return self._groups[0][1].lengths

    def __len__(self) -> int:
        """The number of columns so far."""
        return self._n_columns

    @property
    def _n_columns(self) -> int:
        group = self._groups[0][1]
        return int((group._next - self._next).max()) if group._slots is not None else 0

    def positions(self, n_tokens: int, device: torch.device | str = "cpu") -> Int[Tensor, "b T"]:
        """The positions of the next tokens in their texts; negative for padding."""
        return self._groups[0][1].positions(n_tokens, device)

    def check(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> None:
        """Raise the errors of `append` for tensors that it cannot add."""
        if k.shape[1] != len(self.windows):
            raise ShapeError(
                f"PerHeadKVCache: {k.shape[1]} kv heads, but windows for {len(self.windows)}. "
                f"Give one window for each."
            )
        for heads, group in self._groups:
            group.check(k[:, heads], v[:, heads])

    def join(self, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T Dv"]) -> CachedKeys:
        """All keys over all columns, zeros where a head has dropped them."""
        self._joined = [group.join(k[:, heads], v[:, heads]) for heads, group in self._groups]
        n_columns, first = self._n_columns + k.shape[2], self._next.to(k.device)
        whole = [x.new_zeros(*x.shape[:2], n_columns, x.shape[3]) for x in (k, v)]
        for (heads, _), joined in zip(self._groups, self._joined, strict=True):
            # Slots whose token was dropped have a negative position, as padding has.
            columns = joined.positions - first[:, None]
            is_empty = (joined.positions < 0) | (columns < 0)
            places = columns.masked_fill(is_empty, n_columns)[:, None, :, None]
            for all_heads, x in zip(whole, joined[:2], strict=True):
                spread = x.new_zeros(*x.shape[:2], n_columns + 1, x.shape[3])
                index = places.expand(*x.shape)
                all_heads[:, heads] = spread.scatter(2, index, x)[:, :, :n_columns]
        positions = first[:, None] + torch.arange(n_columns, device=k.device)
        return CachedKeys(whole[0], whole[1], positions)

    def keep(self, cached: CachedKeys) -> None:
        """Store what `join` returned."""
        for (_, group), joined in zip(self._groups, self._joined, strict=True):
            group.keep(joined)
        self._joined = []

    def visible(
        self, cached: CachedKeys, query_at: Int[Tensor, "b T"], n_heads: int
    ) -> Mask | None:
        """The mask of columns for these queries and each query head, without causality."""
        sizes = torch.tensor([1 << 60 if size is None else size for size in self.windows])
        windows = sizes.repeat_interleave(n_heads // len(sizes))
        return _HeadWindows(cached.positions, query_at, windows, self._kept_sinks)

    def crop(self, lengths: int | Sequence[int] | Int[Tensor, " B"]) -> None:
        """Refused: the heads would have to agree on what they have dropped.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"PerHeadKVCache.crop: to {lengths}, but heads keep windows {list(self.windows)}. Run "
            f"the text again."
        )

    def reorder(self, index: Sequence[int] | Int[Tensor, " beams"]) -> None:
        """Select texts of the batch, such as the surviving beams; a text may be repeated."""
        for _, group in self._groups:
            group.reorder(index)
        if len(self._next) > 1:
            self._next = self._next[torch.as_tensor(index).to(self._next.device)]


@dataclass(frozen=True)
class _HeadWindows(Mask):
    """What each query head sees of columns at these positions."""

    key_at: Int[Tensor, "b S"]
    query_at: Int[Tensor, "b T"]
    windows: Int[Tensor, " H"]
    sinks: int

    def tile(self, tile: Tile) -> Bool[Tensor, "b H R n"]:
        keys = self.key_at[:, tile.keys.start : tile.keys.stop][:, None, None]
        queries = self.query_at[:, tile.rows.start : tile.rows.stop][:, None, :, None]
        windows = self.windows.to(keys.device)[None, :, None, None]
        near = queries - keys < windows
        return (keys >= 0) & (near | (keys < self.sinks))

    @property
    def batch(self) -> tuple[int, int]:
        return len(self.key_at), len(self.windows)
