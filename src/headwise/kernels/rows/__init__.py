"""The kernel in plain PyTorch: heads, weights and statistics, a block of rows at a time."""

from headwise.kernels.rows._attend import HeadBlock as HeadBlock
from headwise.kernels.rows._attend import attend_rows as attend_rows
from headwise.kernels.rows._attend import weights_from_lse as weights_from_lse
from headwise.kernels.rows._attend import weights_in_blocks as weights_in_blocks
from headwise.kernels.rows._attend import weights_of_head as weights_of_head
from headwise.kernels.rows._cells import LOG2E as LOG2E
from headwise.kernels.rows._kernel import ROWS as ROWS
