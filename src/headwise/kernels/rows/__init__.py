"""The kernel in plain PyTorch: heads, weights and statistics, some rows at a time."""

from headwise.kernels.rows._attend import (
    HeadBlock,
    attend_rows,
    weights_in_blocks,
    weights_of_head,
)
from headwise.kernels.rows._cells import LOG2E
from headwise.kernels.rows._statistics import rows_statistics

__all__ = [
    "LOG2E",
    "HeadBlock",
    "attend_rows",
    "rows_statistics",
    "weights_in_blocks",
    "weights_of_head",
]
