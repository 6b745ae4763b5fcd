"""The contract of a kernel: why it cannot compute something, heads, and statistics of rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import (
    in_forward_gradient,
    in_func_gradient,
    needs_gradient,
    under_autocast,
)
from headwise.kernels.spec._request import Named, RowRequest, RowStatistics
from headwise.kernels.spec._rule import AttentionRule
from headwise.masks.tiles import Tile


class Extras(NamedTuple):
    """What is returned besides the heads."""

    weights: bool = False
    lse: bool = False
    entropy: bool = False


class AttentionProblem(NamedTuple):
    """The input of a kernel: to decide whether and how it computes this, and to compute it."""

    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    dropout_p: float = 0.0  # the share of weights dropped
    extras: Extras = Extras()


class KernelChoice(NamedTuple):
    """The kernel that computes, the form of its input, and the reasons."""

    backend: str  # "native", "triton", "fused" or "rows"
    form: str  # of the mask: "none", "causal" (the kernel's own flag), "blocks" or "dense"
    packed: bool  # the heads of a group as rows of one head, so that keys are read once
    wide: bool  # half precision computed in float32
    reason: str


# The heads of queries, keys and values; None where `attend` has to look at their values.
ComputeHeads = Callable[[Tensor, Tensor, Tensor], Tensor | None]


class AttentionKernel(ABC):
    """One way to compute attention: each of the folders beside this one has one.

    A request asks for statistics of rows; without one it is about heads. No method that decides
    about an input reads its values.

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
    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        """Why the kernel cannot compute this; None if it can."""

    def is_preferred(self, problem: AttentionProblem, request: RowRequest | None = None) -> bool:
        """Whether it is faster than the kernels after it, where both can compute this."""
        return True

    @abstractmethod
    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        """In what form the kernel takes the input of `attend`, after why it was chosen."""

    @abstractmethod
    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads`, and of the extras those that come from the same pass."""

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> ComputeHeads | None:
        """What computes the heads of all plain problems of this outline; None: `attend` does.

        A plain problem has no tensors but queries, keys and values, no dropout and no extras.
        """
        return None

    def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
        """Statistics of the weights of every row."""
        raise NotImplementedError


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


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the precision to which autocast, if it is on, casts them."""
    if not under_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
