"""The mask of heads that see the first tokens of each text and the latest."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.masks import Mask
from headwise.masks.tiles import Tile


@dataclass(frozen=True)
class StreamingMask(Mask):
    """Each head sees the first `sinks` tokens of the text and the last of its window.

    Attributes:
        sinks: The number of first tokens that every head sees.
        windows: For each head the number of latest tokens, the query's own included.
        first: The column of the first token of each text; None if no row is padded.
    """

    sinks: int
    windows: Int[Tensor, " H"]
    first: Int[Tensor, " B"] | None = None

    def tile(self, tile: Tile) -> Bool[Tensor, "#B H R n"]:
        windows = self.windows.to(tile.device)[None, :, None, None]
        starts = torch.zeros(1, dtype=torch.long) if self.first is None else self.first
        position = tile.key_at - starts.to(tile.device)[:, None]  # b n
        is_sink = ((position >= 0) & (position < self.sinks))[:, None, None]
        return is_sink | (tile.query_at - tile.key_at < windows)

    @property
    def batch(self) -> tuple[int, int]:
        return 1 if self.first is None else len(self.first), len(self.windows)
