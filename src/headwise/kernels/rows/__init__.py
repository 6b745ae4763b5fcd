"""The kernel in plain PyTorch: heads, weights and statistics, a block of rows at a time."""

from headwise.kernels.rows._attend import (
    HeadBlock,
    attend_rows,
    weights_from_lse,
    weights_in_blocks,
    weights_of_head,
)
from headwise.kernels.rows._cells import LOG2E
from headwise.kernels.rows._kernel import ROWS

__all__ = [
    "LOG2E",
    "ROWS",
    "HeadBlock",
    "attend_rows",
    "weights_from_lse",
    "weights_in_blocks",
    "weights_of_head",
]
