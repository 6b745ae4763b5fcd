"""The text of each row, the rows that count for each statistic, and sums over them by text."""

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

    def sums(self, values: Shaped[Tensor, "*calls B H T"]) -> Float[Tensor, "*calls M H"]:
        """Sums over the queries of each text, in double precision."""
        if self.number is None:
            return values.sum(-1, dtype=torch.float64)
        rows = values.double().movedim((-3, -1), (0, 1)).flatten(0, 1)  # (B T) *calls H
        sums = rows.new_zeros(self.n_texts, *rows.shape[1:])
        return sums.index_add_(0, self.number.flatten(), rows).movedim(0, -2)


# The rows for which a statistic is defined and its value under even weights; None: every real
# row, and no such value.
Rule = tuple[Bool[Tensor, "B H T"] | None, Float[Tensor, "B H T"] | None]


def stacked(
    values: Sequence[Shaped[Tensor, "B H T"]], like: Shaped[Tensor, "B H T"]
) -> Shaped[Tensor, "K B H T"]:
    """The values of all statistics together; a request may have none."""
    return torch.stack(list(values)) if values else like.new_empty((0, *like.shape))


@dataclass(frozen=True)
class EligibleRows:
    """The rows that count for each of `K` statistics, and what follows from masks alone.

    Attributes:
        bits: All ones for rows that count, and zeros for the others.
        floor: 0 for rows that count, and minus infinity for the others.
        count: The number of rows of each of `M` texts.
        even: The sums under even attention; NaN where that has no meaning.
        undefined: Whether no row of a head counts.
    """

    bits: Int[Tensor, "K B H T"]
    floor: Float[Tensor, "K B H T"]
    count: Float[Tensor, "K M H"]
    even: Float[Tensor, "K M H"]
    undefined: Bool[Tensor, "K H"]

    @classmethod
    def of(
        cls, rules: Sequence[Rule], real: Bool[Tensor, "B H T"], texts: RowTexts
    ) -> "EligibleRows":
        """The rows that are real and eligible by the rule of each statistic."""
        rows = stacked([real if rule is None else rule for rule, _ in rules], real) & real
        nowhere = torch.full(real.shape, torch.nan, device=real.device)
        values = stacked([nowhere if even is None else even for _, even in rules], nowhere)
        even = texts.sums(torch.where(rows, values, 0.0))
        no_even = torch.tensor(
            [even is None for _, even in rules], dtype=torch.bool, device=real.device
        )
        count = texts.sums(rows)
        return cls(
            bits=-rows.to(torch.int32),
            floor=torch.where(rows, 0.0, -torch.inf),
            count=count,
            even=even.masked_fill(no_even[:, None, None], torch.nan),
            undefined=count.sum(1) == 0,
        )

    def sums_of(
        self, values: Float[Tensor, "K n B H T"], texts: RowTexts
    ) -> tuple[Float[Tensor, "3 K n M H"], Float[Tensor, "K n H"]]:
        """The sums of `n` calls on the same `M` texts, and the largest values.

        Args:
            values: Overwritten, since new memory costs more than all the sums.
        Returns:
            The number of rows, the sums over them and the sums under even attention, by text; and
            the maximum of each statistic, NaN where no row counts.
        """
        # As bits, since filling by a mask takes longer than all the rest.
        as_bits = torch.int64 if values.dtype == torch.float64 else torch.int32
        values.view(as_bits).bitwise_and_(self.bits[:, None])
        sums = texts.sums(values)
        count, even = (x[:, None].expand_as(sums) for x in (self.count, self.even))
        highest = values.add_(self.floor[:, None]).amax((2, 4)).double()
        undefined = self.undefined[:, None]
        return torch.stack([count, sums, even]), highest.masked_fill(undefined, torch.nan)
