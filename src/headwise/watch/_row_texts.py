"""Which text each row of statistics belongs to, and sums of rows by text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class RowTexts:
    """Which rows of statistics are queries of a text, and of which text.

    Attributes:
        real: False for padding.
        number: The text of each query, from 0 to `n_texts`; None: each row is a text.
        is_cross: Whether the keys belong to another text than the queries.
    """

    real: Bool[Tensor, "B T"]
    number: Int[Tensor, "B T"] | None
    n_texts: int
    is_cross: bool

    @classmethod
    def joined(cls, parts: Sequence["RowTexts"]) -> "RowTexts":
        """The rows of one part after the other, each with texts of its own."""
        real = torch.cat([part.real for part in parts])
        n_texts = sum(part.n_texts for part in parts)
        number = None
        if n_texts != len(real):
            numbers, before = [], 0
            for part in parts:
                numbers.append(part.numbers + before)
                before += part.n_texts
            number = torch.cat(numbers)
        return cls(real, number, n_texts, parts[0].is_cross)

    @property
    def numbers(self) -> Int[Tensor, "B T"]:
        """The text of each query."""
        B, T = self.real.shape
        rows = torch.arange(B, device=self.real.device)[:, None].expand(B, T)
        return rows if self.number is None else self.number

    def sums(self, values: Shaped[Tensor, "K B H T"]) -> Float[Tensor, "K M H"]:
        """Sums over the queries of each text, in double precision."""
        if self.number is None:
            return values.sum(-1, dtype=torch.float64)
        K, B, H, T = values.shape
        rows = values.double().permute(1, 3, 0, 2).reshape(B * T, K, H)
        sums = rows.new_zeros(self.n_texts, K, H).index_add_(0, self.number.flatten(), rows)
        return sums.transpose(0, 1)
