"""The contract of a kernel: why it cannot compute something, heads, and statistics of rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from headwise._torch_private import (
    in_forward_gradient,
    in_func_gradient,
    is_eager,
    needs_gradient,
)
from headwise.kernels.spec._problem import AttentionProblem
from headwise.kernels.spec._request import Named, RowRequest, RowStatistics, SharedRequest
from headwise.masks.tiles import Tile


class KernelChoice(NamedTuple):
    """The kernel that computes, the form of its input, and the reasons."""

    backend: str  # "native", "triton", "fused" or "rows"
    form: str  # of the mask: "none", "causal" (the kernel's own flag), "blocks" or "dense"
    packed: bool  # the heads of a group as rows of one head, so that keys are read once
    wide: bool  # half precision computed in float32
    reason: str


SolveHeads = Callable[[AttentionProblem], Named]
ComputeHeads = Callable[[Tensor, Tensor, Tensor], Tensor]
ComputeStatistics = Callable[[AttentionProblem, RowRequest], RowStatistics]


class StatisticsBuffer(ABC):
    """Statistics of several calls that differ in queries and keys alone, in the same tensors.

    Attributes:
        most: The number of calls for which there is room.
        n: The number of calls so far.
    """

    def __init__(self, most: int) -> None:
        self.most, self.n = most, 0

    def add(self, q: Tensor, k: Tensor) -> bool:
        """Compute the statistics of one more call; False if it has no place here."""
        if self.n == self.most or not (is_eager(q, k) and self._add(q, k)):
            return False
        self.n += 1
        return True

    def clear(self) -> None:
        """Make room again; what `statistics` has returned is overwritten."""
        self.n = 0

    @abstractmethod
    def _add(self, q: Tensor, k: Tensor) -> bool:
        """Compute the statistics of a call into part `n`; False if its form is another."""

    @abstractmethod
    def statistics(self) -> RowStatistics:
        """The rows of all calls, one call after the other."""


class AttentionKernel(ABC):
    """One way to compute attention: each of the folders beside this one has one.

    No method that decides about an input reads its values.

    Attributes:
        name: How users name it: `backend=name`.
        guards_nonfinite: Whether the heads of `attend` are right where masked keys or values are
            NaN or infinite, without a guard around it.
        missing_statistics: The statistics that are left to the rows kernel; empty if none are.
    """

    name: str
    guards_nonfinite: bool = False
    missing_statistics: str = ""

    @property
    def label(self) -> str:
        """How results name it."""
        return self.name

    @abstractmethod
    def why_not(self, problem: AttentionProblem) -> str | None:
        """Why the kernel cannot compute these heads; None if it can."""

    def is_preferred(self, problem: AttentionProblem) -> bool:
        """Whether it is faster than the kernels after it, for heads that both can compute."""
        return True

    @abstractmethod
    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        """In what form the kernel takes this input, after `reason`, why it was chosen."""

    @abstractmethod
    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads`, and of the extras those that come from the same pass."""

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> SolveHeads:
        """A function equal to `attend` for this problem and all others of its outline."""
        return partial(self.attend, choice=choice)

    def prepare_heads(
        self, problem: AttentionProblem, choice: KernelChoice, otherwise: ComputeHeads
    ) -> ComputeHeads:
        """What computes the heads of this plain problem and all others of its outline.

        A plain problem has no dropout, no extras and no autocast, and no tensors but queries, keys
        and values. `otherwise` computes them in any case, with the guard that the kernel needs.
        """
        return otherwise

    def why_no_statistics(
        self, problem: AttentionProblem, request: RowRequest | None
    ) -> str | None:
        """Why the kernel cannot compute these statistics of rows; None if it can."""
        return "it has no statistics of rows"

    def is_preferred_for_statistics(self, problem: AttentionProblem) -> bool:
        """Whether it is faster than the kernels after it, for statistics that both can compute."""
        return True

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of the weights of every row."""
        raise NotImplementedError

    def prepare_statistics(
        self, problem: AttentionProblem, request: RowRequest
    ) -> ComputeStatistics:
        """A function equal to `statistics` for this problem and all others of its outline."""
        return self.statistics

    def statistics_buffer(
        self, problem: AttentionProblem, request: SharedRequest, most: int
    ) -> StatisticsBuffer | None:
        """A buffer for the statistics of up to `most` such problems; None: it has none for them."""
        return None


def why_no_gradients_or_dropout(problem: AttentionProblem) -> str | None:
    """Why our kernels cannot compute this: dropout, or gradients that they do not have."""
    if problem.dropout_p:
        return f"it has no dropout (dropout_p={problem.dropout_p})"
    if problem.rule.bias is not None:
        T, S = problem.q.shape[2], problem.k.shape[2]
        sample = problem.rule.bias.tile(Tile.sample(T, S))
        if needs_gradient(sample):
            return "it has no gradients of a bias"
    if in_forward_gradient():
        return "it has no forward-mode gradients"
    if in_func_gradient():
        return "it has no gradients by torch.func"
    return None
