"""Problems that are complete but for the addresses of tensors, and the call of the kernel."""

import ctypes
import os
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headwise._library import DONE, NO_MEMORY, NOT_FINITE, Problem, library
from headwise.kernels.native._check import check_extent
from headwise.kernels.spec import (
    AttentionProblem,
    ComputeHeads,
    ComputeStatistics,
    Named,
    RowRequest,
    RowStatistics,
    SolveHeads,
    StatisticsBuffer,
)

# Pairs of queries and keys up to which waking a second thread costs more than it gains. Where few
# queries are packed, keys come from memory: it gains from these pairs times the width of a head on.
ONE_THREAD, ONE_THREAD_PACKED = 1 << 15, 3 << 14


class _Threads:
    """The number of threads: those of torch, from the same pool."""

    most = 1 << 20

    @classmethod
    def use_one(cls) -> None:
        """Use one thread: after a fork the thread pool is gone, and waiting for it would hang."""
        cls.most = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.use_one)


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

    def heads_alone(self, otherwise: ComputeHeads, item: int, is_masked: bool) -> ComputeHeads:
        """What computes the heads of tensors of the outline, of `item` bytes a number.

        It is one function that touches few objects: after a kernel that fills the caches, each of
        them comes from memory, and a token on few keys takes longer in Python than in the kernel.

        It also keeps what the problem refers to.

        Args:
            otherwise: What computes heads where inputs are not aligned or not in memory, or where
                nonfinite masked values must be kept out.
        """
        kernel, outline = _function("headwise_heads"), ctypes.byref(self.problem)
        q_length, k_length, v_length = [length for _, length in self.lengths]
        ((_, allocate),) = self.outputs
        has_pool = torch.get_num_threads() > 1  # part of the outline
        expected = (DONE,) if is_masked else (DONE, NOT_FINITE)

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if (
                (q_start | k_start | v_start) % item == 0
                and q.storage_offset() * item + q_length <= q.untyped_storage().nbytes()
                and k.storage_offset() * item + k_length <= k.untyped_storage().nbytes()
                and v.storage_offset() * item + v_length <= v.untyped_storage().nbytes()
            ):  # fmt: skip
                result, threads = allocate(), n_threads(self.shares_threads) if has_pool else 1
                start = result.data_ptr()
                if kernel(outline, q_start, k_start, v_start, start, threads) in expected:
                    return result
            return otherwise(q, k, v)

        return heads

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


class NativeBuffer(StatisticsBuffer):
    """Statistics of calls of one outline; a call only writes two addresses and runs the kernel."""

    def __init__(self, prepared: PreparedProblem, q: Tensor, k: Tensor, most: int) -> None:
        super().__init__(most)
        self._form, self._library = _form_of(q, k), library()
        self._prepared = prepared  # with the tensors that its problem refers to
        self._parts: Named = {}
        self._constant: Named = {}
        for name, allocate in prepared.outputs:
            x = allocate()
            if name in prepared.constant:
                self._constant[name] = x
            else:
                self._parts[name] = x.new_empty((most, *x.shape))
        self._problems: list[Problem] = []  # one for each part, complete but for two addresses

    def _add(self, q: Tensor, k: Tensor) -> bool:
        if _form_of(q, k) != self._form or library() is not self._library:
            return False
        if self.n == len(self._problems):
            self._problems.append(self._new_problem())
        problem, prepared = self._problems[self.n], self._prepared
        (_, q_length), (_, k_length), _ = prepared.lengths
        problem.q = q_start = check_extent("q", q, q_length)[0]
        problem.k = k_start = check_extent("k", k, k_length)[0]
        if (q_start | k_start) % q.itemsize:
            return False
        problem.threads = n_threads(prepared.shares_threads)
        run(problem)
        return True

    def _new_problem(self) -> Problem:
        """The problem of the next part. The first one also computes what is constant."""
        problem = Problem.from_buffer_copy(self._prepared.problem)
        for name, x in self._constant.items():
            setattr(problem, name, None if self._problems else x.data_ptr())
        for name, parts in self._parts.items():
            setattr(problem, name, parts[len(self._problems)].data_ptr())
        return problem

    def statistics(self) -> RowStatistics:
        outputs = {name: x[: self.n] for name, x in self._parts.items()}
        outputs |= {name: x.expand(self.n, *x.shape) for name, x in self._constant.items()}
        return as_statistics({name: x.flatten(0, 1) for name, x in outputs.items()})


def _form_of(q: Tensor, k: Tensor) -> tuple[Hashable, ...]:
    """All that the calls of a buffer have in common."""
    return q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype


def allocation(like: Tensor) -> partial[Tensor]:
    """What allocates a tensor like this one."""
    return partial(
        torch.empty_strided, tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device
    )


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
    outcome = _function(function)(ctypes.byref(problem))
    if outcome == NO_MEMORY:
        sizes = {name: getattr(problem, name) for name in ("B", "H", "Hkv", "T", "S", "D", "Dv")}
        raise MemoryError(f"native: out of memory for a problem of sizes {sizes}.")
    return bool(outcome != NOT_FINITE)


def _function(name: str) -> Callable[..., int]:
    return getattr(library().functions, name)


def as_statistics(results: Named) -> RowStatistics:
    """The outputs of the kernel as statistics of rows."""
    return RowStatistics(**results, kernel=f"native ({library().name})")
