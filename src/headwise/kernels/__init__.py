"""Attention: one function that mixes values, and one that describes the weights of each row."""

from headwise.kernels._attend import AttendOutput as AttendOutput
from headwise.kernels._attend import attend as attend
from headwise.kernels._attend import attend_by_rule as attend_by_rule
from headwise.kernels._attend import computes_both_at_once as computes_both_at_once
from headwise.kernels._attend import row_statistics as row_statistics
from headwise.kernels._attend import statistics_kernel as statistics_kernel
from headwise.kernels._attend import summing_kernel as summing_kernel
from headwise.kernels._contract import AttentionProblem as AttentionProblem
from headwise.kernels._contract import Extras as Extras
from headwise.kernels._contract import KernelChoice as KernelChoice
from headwise.kernels._contract import RowReduction as RowReduction
from headwise.kernels._contract import RowRequest as RowRequest
from headwise.kernels._contract import RowStatistics as RowStatistics
from headwise.kernels._contract import autocast_inputs as autocast_inputs
from headwise.kernels._rule import AttentionRule as AttentionRule
from headwise.kernels._rule import Bias as Bias
from headwise.kernels._rule import BiasLike as BiasLike
from headwise.kernels._rule import MaskLike as MaskLike
from headwise.kernels._rule import TensorBias as TensorBias
from headwise.kernels._rule import make_rule as make_rule
from headwise.kernels.native import is_packed as is_packed
from headwise.kernels.native import native_is_faster as native_is_faster
from headwise.kernels.rows import HeadBlock as HeadBlock
from headwise.kernels.rows import attend_rows as attend_rows
from headwise.kernels.rows import weights_in_blocks as weights_in_blocks
from headwise.kernels.rows import weights_of_head as weights_of_head
