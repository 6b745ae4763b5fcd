"""Builds the problem of the native kernel: checks inputs, allocates outputs, runs the kernel.

A problem is solved at once, or prepared and solved for all tensors of one outline.
"""

import ctypes
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._library import NO_MEMORY, NOT_FINITE, Problem, library
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels.native._check import (
    ByteSpan,
    check_apart,
    check_axes,
    check_extent,
    check_heads,
    check_memory,
    check_size,
    check_sizes,
    check_tensor,
    dense_last,
    is_aligned,
    reach,
)
from headwise.kernels.spec import (
    AttentionProblem,
    ComputeStatistics,
    Named,
    RowRequest,
    RowStatistics,
    SolveHeads,
)

# Pairs of queries and keys up to which waking a second thread costs more than it gains. Where few
# queries are packed, keys come from memory: it gains from these pairs times the width of a head on.
ONE_THREAD, ONE_THREAD_PACKED = 1 << 15, 3 << 14
# The dtypes that the kernel reads, and their numbers in `ElementType`.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPE_NAMES = ", ".join(map(str, DTYPES))
# The address of empty tensors: a null pointer would mean that there is none.
_NOWHERE = torch.zeros(64)
_Strides = tuple[int, ...]


class _Threads:
    """The number of threads: those of torch, from the same pool."""

    most = 1 << 20

    @classmethod
    def use_one(cls) -> None:
        """Use one thread: after a fork the thread pool is gone, and waiting for it would hang."""
        cls.most = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.use_one)


class _Layout(NamedTuple):
    """Sizes and strides that fit together, and how many bytes queries, keys and values span."""

    sizes: dict[str, int]
    problem: Problem
    lengths: tuple[tuple[str, int], ...]
    dense: bool  # in their last axes, as the kernel takes them


@lru_cache(maxsize=1024)  # layers and batches of a model have few different layouts
def _layout(
    dtype: torch.dtype,
    q: torch.Size,
    q_strides: _Strides,
    k: torch.Size,
    k_strides: _Strides,
    v: torch.Size,
    v_strides: _Strides,
) -> _Layout:
    if dtype not in DTYPES:
        raise ArgumentError(f"native: q is {dtype}. The kernel takes {_DTYPE_NAMES}.")
    check_axes(q, k, v)
    (B, H, T, D), (_, Hkv, S, Dv) = q, v
    sizes = {"B": B, "H": H, "Hkv": Hkv, "T": T, "S": S, "D": D, "Dv": Dv}
    check_heads(H, Hkv)
    check_sizes(sizes, {"q": q, "k": k, "v": v})
    for name, shape, fitting in (("k", k, (B, Hkv, S, D)), ("v", v, (B, Hkv, S, Dv))):
        if shape != fitting:
            raise ShapeError(f"native: {name} has shape {tuple(shape)} instead of {fitting}.")
    problem = Problem(
        dtype=DTYPES[dtype],
        **sizes,
        q_stride=q_strides[:3],
        k_stride=k_strides[:3],
        v_stride=v_strides[:3],
    )
    inputs = (("q", q, q_strides), ("k", k, k_strides), ("v", v, v_strides))
    lengths = tuple((name, dtype.itemsize * reach(*lies)) for name, *lies in inputs)
    dense = all(strides[-1] == 1 or shape[-1] <= 1 or 0 in shape for _, shape, strides in inputs)
    return _Layout(sizes, problem, lengths, dense)


@dataclass
class ProblemBuilder:
    """A problem, and the tensors that its pointers refer to."""

    sizes: dict[str, int]
    problem: Problem = field(default_factory=Problem)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    spans: list[ByteSpan] = field(default_factory=list)
    copied: bool = False  # what it reads are copies of the queries, keys and values it was given

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
    ) -> "ProblemBuilder":
        """A problem with queries, keys and values of one dtype, without outputs."""
        layout = _layout(q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        if not layout.dense:
            return replace(cls.of(*dense_last((q, k, v))), copied=True)
        builder = cls(layout.sizes, Problem.from_buffer_copy(layout.problem))
        for (name, length), x in zip(layout.lengths, (q, k, v), strict=True):
            span = check_memory(name, x, q.dtype, length)
            if not is_aligned(span, q.dtype):
                return replace(cls.of(q.clone(), k.clone(), v.clone()), copied=True)
            builder._point(name, span, x)
            builder.inputs[name] = x
        return builder

    def set(self, name: str, value: int | float) -> None:
        """Set a field that is a number."""
        setattr(self.problem, name, value)

    def add_input(
        self,
        name: str,
        x: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strided_axes: int = 0,
    ) -> None:
        """Add an input: a tensor that is dense except for its first, strided axes."""
        self._point(name, check_tensor(name, x, shape, dtype, strided_axes), x, strided_axes)
        self.inputs[name] = x

    def add_output(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strides: tuple[int, ...] = (),
        strided_axes: int = 0,
    ) -> Tensor:
        """Allocate an output: dense, or with these strides."""
        check_size(name, shape)
        q = self.inputs["q"]  # new tensors go to its device, whatever the default is
        if strides:
            x = q.new_empty_strided(shape, strides, dtype=dtype)
        else:
            x = q.new_empty(shape, dtype=dtype)
        start = x.data_ptr()
        self._point(name, (start, start + x.nbytes, name), x, strided_axes)
        self.outputs[name] = x
        return x

    def solve(self, function: str = "headwise_forward") -> bool:
        """Run the kernel. Returns whether all requested heads are finite.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        check_apart(self.spans, self.outputs)
        self.problem.threads = n_threads(shares_threads(self.problem))
        return run(self.problem, function)

    def prepare(self, constant: Collection[str] = ()) -> "PreparedProblem | None":
        """The problem with all its outputs, to be solved for other tensors of its outline.

        None if it reads copies of the inputs, or if there is nothing to compute.

        Args:
            constant: The outputs that are the same for all of these tensors: computed once.
        """
        inputs, problem = self.inputs, self.problem
        if self.copied or not all(x.numel() for x in (inputs["q"], inputs["k"])):
            return None
        return PreparedProblem(
            problem=problem,
            shares_threads=shares_threads(problem),
            lengths=[(name, stop - start) for start, stop, name in self.spans[:3]],
            outputs=[(name, _allocation(x)) for name, x in self.outputs.items()],
            kept=[x for name, x in inputs.items() if name not in ("q", "k", "v")],
            constant=constant,
        )

    def _point(self, name: str, span: ByteSpan, x: Tensor, strided_axes: int = 0) -> None:
        self.spans.append(span)
        setattr(self.problem, name, address(span[0]))
        if strided_axes:
            getattr(self.problem, f"{name}_stride")[:] = x.stride()[:strided_axes]


@dataclass(frozen=True)
class PreparedProblem:
    """A problem complete but for the addresses of queries, keys, values and outputs.

    Everything else is the same in all calls of one outline: it is checked, and written into the
    fields of a problem, at the first of them.
    """

    problem: Problem
    lengths: Sequence[tuple[str, int]]  # the inputs, and the bytes that each spans
    outputs: Sequence[tuple[str, partial[Tensor]]]  # and how each is allocated
    shares_threads: bool  # whether a second thread gains anything
    kept: Sequence[Tensor]  # other inputs, such as positions: the same in each call
    constant: Collection[str]  # outputs that are the same in each call
    known: Named = field(default_factory=dict)  # and these, from the first call on

    def heads(self, otherwise: SolveHeads, problem: AttentionProblem) -> Named:
        """The heads of another problem of the outline; `otherwise` where nonfinite masked values
        must be kept out, or inputs are not aligned.
        """
        outputs, finite = self._solve(problem)
        if finite or (outputs and problem.rule.visible is None):
            return outputs
        return otherwise(problem)

    def statistics(
        self, otherwise: ComputeStatistics, problem: AttentionProblem, request: RowRequest
    ) -> RowStatistics:
        """The statistics of another problem of the outline; `otherwise` as for `heads`."""
        outputs, finite = self._solve(problem)
        if finite or (outputs and (not request.heads or problem.rule.visible is None)):
            return as_statistics(outputs)
        return otherwise(problem, request)

    def _solve(self, given: AttentionProblem) -> tuple[Named, bool]:
        """The outputs, and whether all heads are finite; nothing if inputs are not aligned.

        Raises:
            ArgumentError: the memory of an input was freed.
        """
        problem, starts, item = Problem.from_buffer_copy(self.problem), 0, given.q.itemsize
        for (name, length), x in zip(self.lengths, given[:3], strict=True):
            start = x.data_ptr()
            if not start or x.storage_offset() * item + length > x.untyped_storage().nbytes():
                check_extent(name, x, length)  # it says what is wrong, if anything is
            starts |= start
            setattr(problem, name, start)
        if starts % item:
            return {}, False
        outputs = dict(self.known)
        for name, allocate in self.outputs:
            if name in outputs:
                setattr(problem, name, None)
            else:
                outputs[name] = x = allocate()
                setattr(problem, name, x.data_ptr())
        problem.threads = n_threads(self.shares_threads)
        finite = run(problem)
        if self.constant and not self.known:
            self.known.update({name: x for name, x in outputs.items() if name in self.constant})
        return outputs, finite


def _allocation(like: Tensor) -> partial[Tensor]:
    """What allocates a tensor like this one."""
    return partial(
        torch.empty_strided, tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device
    )


def address(start: int) -> int:
    """The pointer that the kernel gets for an array at this address."""
    return start or _NOWHERE.data_ptr()


def shares_threads(problem: Problem) -> bool:
    """Whether a problem is large enough for a second thread to gain more than waking it costs."""
    pairs: int = problem.B * problem.H * problem.T * problem.S
    if problem.packed:
        return pairs * problem.D >= ONE_THREAD_PACKED
    return pairs > ONE_THREAD


def n_threads(shared: bool) -> int:
    """The number of threads to use: those of torch if they share the problem, otherwise one."""
    return min(torch.get_num_threads(), _Threads.most) if shared else 1


def run(problem: Problem, function: str = "headwise_forward") -> bool:
    """Run the kernel on a problem that is complete. Returns whether all requested heads are finite.

    Raises:
        MemoryError: there is no memory to compute in.
    """
    outcome = getattr(library().functions, function)(ctypes.byref(problem))
    if outcome == NO_MEMORY:
        sizes = {name: getattr(problem, name) for name in ("B", "H", "Hkv", "T", "S", "D", "Dv")}
        raise MemoryError(f"native: out of memory for a problem of sizes {sizes}.")
    return bool(outcome != NOT_FINITE)


def as_statistics(results: Named) -> RowStatistics:
    """The outputs of the kernel as statistics of rows."""
    return RowStatistics(**results, kernel=f"native ({library().name})")
