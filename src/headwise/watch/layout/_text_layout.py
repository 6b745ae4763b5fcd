"""Which text each column of a batch belongs to, and its position there."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class TextLayout:
    """The columns of each text of a batch; several texts may be packed into one row.

    Positions count within a text, without padding. `index` maps positions to columns: in row
    `row[m]`, the columns of text `m` are the `length[m]` entries from `start[m]` on, in order.
    Where `is_whole`, each row is one text without padding, whose positions are columns.
    """

    text: Int[Tensor, "B n"]  # the number of the text in each column
    position: Int[Tensor, "B n"]  # the position of each column in its text
    index: Int[Tensor, "B n"]
    row: Int[Tensor, " M"]
    start: Int[Tensor, " M"]
    length: Int[Tensor, " M"]
    is_whole: bool


def text_layout(real: Bool[Tensor, "B n"], packed: Int[Tensor, "B n"] | None) -> TextLayout:
    """The layout of one text per row, or of the texts that `packed` numbers in each row."""
    B, n = real.shape
    rows = torch.arange(B, device=real.device)
    if packed is None:
        is_whole = bool(real.all())
        if is_whole:
            position = index = torch.arange(n, device=real.device).expand(B, n)
        else:
            position = (real.cumsum(-1) - 1).clamp(min=0)
            index = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        return TextLayout(
            text=rows[:, None].expand(B, n),
            position=position,
            index=index,
            row=rows,
            start=torch.zeros_like(rows),
            length=torch.full_like(rows, n) if is_whole else real.sum(-1),
            is_whole=is_whole,
        )
    lengths = real.sum(-1)
    marks = torch.stack([rows[:, None].expand(B, n), packed.to(real.device).expand(B, n)], -1)
    texts, inverse = _in_order(marks[real])
    number = torch.zeros_like(marks[..., 0]).masked_scatter_(real, inverse)
    length = torch.bincount(inverse, minlength=len(texts))
    before = lengths.cumsum(0) - lengths  # real columns in earlier rows
    start = length.cumsum(0) - length - before[texts[:, 0]]
    index = torch.argsort(number.masked_fill(~real, len(texts)), dim=1, stable=True)
    order = torch.arange(n, device=real.device).expand(B, n)
    position = torch.zeros_like(number).scatter_(1, index, order) - start[number]
    return TextLayout(number, position.clamp(min=0), index, texts[:, 0], start, length, False)


def _in_order(marks: Int[Tensor, "n m"]) -> tuple[Int[Tensor, "M m"], Int[Tensor, " n"]]:
    """The distinct marks in order of first occurrence, and the index of each mark among them."""
    distinct, which = torch.unique(marks, dim=0, return_inverse=True)
    count = torch.arange(len(marks), device=marks.device)
    earliest = torch.full_like(distinct[:, 0], len(marks))
    order = earliest.scatter_reduce_(0, which, count, "amin").argsort()
    return distinct[order], order.argsort()[which]
