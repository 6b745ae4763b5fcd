"""Splits rules into parts that kernels read directly, and tensors into a mask and a bias."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise._torch_private import statically
from headwise.masks._mask import Mask, _And, a_tensor
from headwise.masks._rules import Window, _Documents, _Padding
from headwise.masks._tensors import Dense, as_mask, split_additive
from headwise.masks.tiles import Tile

__all__ = ["Dense", "MaskParts", "a_tensor", "keys_alone", "split_additive", "top_left"]


def top_left(T: int, S: int, device: torch.device | None = None) -> Mask:
    """What torch's causal flag hides: query `i` sees keys up to `i`, wherever the keys end."""
    if T == S:
        return Window(None, 0)
    return as_mask(torch.ones(T, S, dtype=torch.bool, device=device).tril())


@dataclass(frozen=True)
class MaskParts:
    """The parts of a mask: a key is visible if all of them allow it; None allows every key."""

    window: Window
    key_range: Int[Tensor, "#B 2"] | None  # the first key of each text, and one past its last
    documents: Int[Tensor, "#B S"] | None
    rest: Mask | None  # is a tensor, or has to be materialized

    @classmethod
    def of(cls, mask: Mask | None, T: int, S: int) -> "MaskParts":
        """The parts for these lengths."""
        window, key_range, documents = Window(None, None), None, None
        rest: Mask | None = None
        for part in _leaves(mask):
            if isinstance(part, Window):
                window = window.nearer(part)
            elif isinstance(part, _Padding):
                key_range = _nearer(key_range, _range_of(part, S))
            elif isinstance(part, _Documents) and documents is None and _fits(part, T, S):
                documents = part.ids
            else:
                rest = part if rest is None else rest & part
        return cls(window, key_range, documents, rest)

    @property
    def is_dense(self) -> bool:
        """Whether the rest is a tensor already."""
        return isinstance(self.rest, Dense)

    def dense(
        self, T: int, S: int, device: torch.device | str = "cpu"
    ) -> Bool[Tensor, "#B #H #T #S"] | None:
        """The rest as a tensor."""
        return None if self.rest is None else self.rest.tile(Tile.whole(T, S, device))


def keys_alone(
    mask: Mask | None, T: int, S: int, device: torch.device
) -> Bool[Tensor, "#B S"] | None:
    """The keys that the parts about keys alone allow: padding, and tensors with a row for all
    queries; None if there are none."""
    keys: Tensor | None = None
    for part in _leaves(mask):
        is_row = isinstance(part, Dense) and part.visible.shape[1:3] == (1, 1)
        if is_row or isinstance(part, _Padding):
            row = part.tile(Tile(T, S, range(1), range(S), device))[:, 0, 0].expand(-1, S)
            keys = row if keys is None else keys & row
    return keys


def _leaves(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, _And):
        yield from _leaves(mask.left)
        yield from _leaves(mask.right)
    elif mask is not None:
        yield mask


def _range_of(padding: _Padding, S: int) -> Int[Tensor, "B 2"]:
    lengths = padding.lengths.clamp(0, S).to("cpu", torch.int64)
    edge = torch.full_like(lengths, 0 if padding.side == "right" else S)
    ends = (edge, lengths) if padding.side == "right" else (S - lengths, edge)
    return torch.stack(ends, dim=-1)


def _nearer(left: Tensor | None, right: Tensor) -> Tensor:
    if left is None:
        return right
    return torch.stack(
        [torch.maximum(left[:, 0], right[:, 0]), torch.minimum(left[:, 1], right[:, 1])], dim=-1
    )


def _fits(documents: _Documents, T: int, S: int) -> bool:
    return statically(documents.ids.shape[-1] == S) and statically(T <= S)
