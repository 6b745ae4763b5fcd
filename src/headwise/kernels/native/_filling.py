"""A problem on its way to the kernel: filled in, checked, solved."""

import ctypes
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._native import NO_MEMORY, NOT_FINITE, Problem, library
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels.native._check import (
    Span,
    check_apart,
    check_axes,
    check_heads,
    check_memory,
    check_size,
    check_sizes,
    check_tensor,
    dense_last,
    is_aligned,
    reach,
)

# Pairs of queries and keys up to which a second thread is not worth waking.
ALONE = 1 << 15
# What the kernel reads, and the number that names it there.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TAKEN = ", ".join(map(str, KINDS))
# What pointers of empty tensors point to.
_NOWHERE = torch.zeros(64)
_Steps = tuple[int, ...]


class _Threads:
    """How many threads compute: as many as torch's, of the same pool."""

    most = 1 << 20

    @classmethod
    def stay_alone(cls) -> None:
        """Use no pool: that of a forked process waits forever for threads that it has lost."""
        cls.most = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.stay_alone)


class _Layout(NamedTuple):
    """Sizes and steps that fit together, and how many bytes queries, keys and values span."""

    sizes: dict[str, int]
    problem: Problem
    lengths: tuple[tuple[str, int], ...]
    dense: bool  # in their last axes, as the kernel takes them


@lru_cache(maxsize=1024)  # the layers of a model, and its batches, are much alike
def _layout(
    dtype: torch.dtype,
    q: torch.Size,
    q_steps: _Steps,
    k: torch.Size,
    k_steps: _Steps,
    v: torch.Size,
    v_steps: _Steps,
) -> _Layout:
    if dtype not in KINDS:
        raise ArgumentError(f"native: q is {dtype}. The kernel takes {_TAKEN}.")
    check_axes(q, k, v)
    (B, H, T, D), (_, Hkv, S, Dv) = q, v
    sizes = {"B": B, "H": H, "Hkv": Hkv, "T": T, "S": S, "D": D, "Dv": Dv}
    check_heads(H, Hkv)
    check_sizes(sizes, {"q": q, "k": k, "v": v})
    for name, shape, fitting in (("k", k, (B, Hkv, S, D)), ("v", v, (B, Hkv, S, Dv))):
        if shape != fitting:
            raise ShapeError(f"native: {name} has shape {tuple(shape)} instead of {fitting}.")
    problem = Problem(
        kind=KINDS[dtype], **sizes, q_step=q_steps[:3], k_step=k_steps[:3], v_step=v_steps[:3]
    )
    told = (("q", q, q_steps), ("k", k, k_steps), ("v", v, v_steps))
    lengths = tuple((name, dtype.itemsize * reach(*lies)) for name, *lies in told)
    dense = all(steps[-1] == 1 or shape[-1] <= 1 or 0 in shape for _, shape, steps in told)
    return _Layout(sizes, problem, lengths, dense)


@dataclass
class Filling:
    """A problem, and the tensors that its pointers point to."""

    sizes: dict[str, int]
    problem: Problem = field(default_factory=Problem)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
    ) -> "Filling":
        """Queries, keys and values of one dtype; nothing is asked for yet."""
        layout = _layout(q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        if not layout.dense:
            return cls.of(*dense_last((q, k, v)))
        filling = cls(layout.sizes, Problem.from_buffer_copy(layout.problem))
        for (name, length), x in zip(layout.lengths, (q, k, v), strict=True):
            span = check_memory(name, x, q.dtype, length)
            if not is_aligned(span, q.dtype):
                return cls.of(q.clone(), k.clone(), v.clone())
            filling._point(name, span, x)
            filling.inputs[name] = x
        return filling

    def number(self, name: str, value: int | float) -> None:
        """Set a field that is a number."""
        setattr(self.problem, name, value)

    def give(
        self,
        name: str,
        x: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        steps: int = 0,
    ) -> None:
        """Let the kernel read a tensor, dense but for the steps of its first axes."""
        self._point(name, check_tensor(name, x, shape, dtype, steps), x, steps)
        self.inputs[name] = x

    def ask(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strides: tuple[int, ...] = (),
        steps: int = 0,
    ) -> Tensor:
        """Let the kernel write a new tensor: dense, or with its numbers in another order."""
        check_size(name, shape)
        q = self.inputs["q"]  # whose device is not that of new tensors, perhaps
        if strides:
            x = q.new_empty_strided(shape, strides, dtype=dtype)
        else:
            x = q.new_empty(shape, dtype=dtype)
        start = x.data_ptr()
        self._point(name, (start, start + x.nbytes, name), x, steps)
        self.outputs[name] = x
        return x

    def solve(self, function: str = "headwise_forward") -> bool:
        """Run the kernel. Whether all heads that it was asked for are finite.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        check_apart(self.spans, self.outputs)
        problem = self.problem
        pairs = problem.B * problem.H * problem.T * problem.S
        problem.threads = min(torch.get_num_threads(), _Threads.most) if pairs > ALONE else 1
        outcome = getattr(library().functions, function)(ctypes.byref(problem))
        if outcome == NO_MEMORY:
            raise MemoryError(f"native: there is no memory to compute in, for {self.sizes}.")
        return bool(outcome != NOT_FINITE)

    def _point(self, name: str, span: Span, x: Tensor, steps: int = 0) -> None:
        self.spans.append(span)
        setattr(self.problem, name, span[0] or _NOWHERE.data_ptr())
        if steps:
            getattr(self.problem, f"{name}_step")[:] = x.stride()[:steps]
