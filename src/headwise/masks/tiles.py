"""Tiles: the rectangles of queries and keys for which masks and biases are computed."""

from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from headwise.errors import ShapeError

# A slice where a length is dynamic, as in an export: a range would fix it.
Span = range | slice


@dataclass(frozen=True)
class Tile:
    """A rectangle of the `T` x `S` plane: queries `rows` against keys `keys`."""

    T: int
    S: int
    rows: Span
    keys: Span
    device: torch.device

    @classmethod
    def whole(cls, T: int, S: int, device: torch.device | str = "cpu") -> "Tile":
        return cls(T, S, slice(0, T), slice(0, S), torch.device(device))

    @classmethod
    def sample(cls, T: int, S: int, device: torch.device | str = "cpu") -> "Tile":
        """A 1×1 sample, to inspect dtype and device: one query and one key at most."""
        return cls(T, S, range(min(1, T)), range(min(1, S)), torch.device(device))

    @property
    def query_at(self) -> Int[Tensor, "R 1"]:
        """The position of each query among the keys."""
        shift = self.S - self.T
        return torch.arange(
            self.rows.start + shift, self.rows.stop + shift, device=self.device
        ).unsqueeze(-1)

    @property
    def key_at(self) -> Int[Tensor, " n"]:
        return torch.arange(self.keys.start, self.keys.stop, device=self.device)


def cut(whole: Shaped[Tensor, "#B #H #T #S"], tile: Tile) -> Shaped[Tensor, "#B #H #R #n"]:
    """The part of a tensor over queries and keys in a tile; axes of length 1 broadcast."""
    for axis, size, name in ((2, tile.T, "queries"), (3, tile.S, "keys")):
        if whole.shape[axis] not in (1, size):
            raise ShapeError(
                f"attend: a mask or bias of shape {tuple(whole.shape)} does not fit {size} "
                f"{name}. Give [..., {tile.T}, {tile.S}], or ones to broadcast; for padding "
                f"use masks.padding(lengths)."
            )
    part = whole.to(tile.device)
    if part.shape[2] > 1:
        part = part[:, :, tile.rows.start : tile.rows.stop]
    if part.shape[3] > 1:
        part = part[..., tile.keys.start : tile.keys.stop]
    return part
