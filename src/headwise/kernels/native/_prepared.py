"""A problem that is built once, and solved for all tensors of one outline.

Everything but the addresses of tensors is the same in these calls. It is checked, and written into
the fields of a problem, at the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise._library import Problem
from headwise._torch_private import needs_gradient
from headwise.kernels.native._builder import ProblemBuilder, as_statistics, n_threads, run
from headwise.kernels.native._check import check_extent
from headwise.kernels.native._compute import (
    build_heads,
    build_statistics,
    is_packed,
    native_statistics,
)
from headwise.kernels.native._gradients import attend_native
from headwise.kernels.spec import (
    AttentionProblem,
    ComputeStatistics,
    Named,
    RowRequest,
    RowStatistics,
    SolveHeads,
    check_rule,
    lower,
)


def prepare_heads(problem: AttentionProblem) -> SolveHeads:
    """A function that computes the heads of this problem and all others of its outline."""
    q, k, v, rule, _, extras = problem
    if needs_gradient(q, k, v) or not rule.is_static:
        return attend_native
    rows = [name for name, has_it in (("lse", any(extras)), ("entropy", extras.entropy)) if has_it]
    lowered = lower(rule, q.shape[2], k.shape[2])
    prepared = _Prepared.of(build_heads(q, k, v, lowered, is_packed(q.shape[2]), rows))
    return attend_native if prepared is None else partial(_solve_heads, prepared)


def _solve_heads(prepared: "_Prepared", problem: AttentionProblem) -> Named:
    outputs, finite = prepared.solve(problem)
    if finite or (outputs and problem.rule.visible is None):
        return outputs
    return attend_native(problem)


def prepare_statistics(problem: AttentionProblem, request: RowRequest) -> ComputeStatistics:
    """A function that describes the rows of this problem and all others of its outline."""
    q, k, v, rule, *_ = problem
    # What keys receive is added to zeros, and norms of values belong to one call.
    if request.received is not None or request.key_norms is not None:
        return native_statistics
    check_rule(rule, q)
    builder, _ = build_statistics(q, k, v if request.heads else v[..., :0], rule, request)
    prepared = _Prepared.of(builder)
    return native_statistics if prepared is None else partial(_describe_rows, prepared)


def _describe_rows(
    prepared: "_Prepared", problem: AttentionProblem, request: RowRequest
) -> RowStatistics:
    outputs, finite = prepared.solve(problem)
    if finite or (outputs and (not request.heads or problem.rule.visible is None)):
        return as_statistics(outputs)
    return native_statistics(problem, request)


@dataclass(frozen=True)
class _Prepared:
    """A problem complete but for the addresses of queries, keys, values and outputs."""

    problem: Problem
    lengths: Sequence[tuple[str, int]]  # the inputs, and the bytes that each spans
    outputs: Sequence[tuple[str, partial[Tensor]]]  # and how each is allocated
    pairs: int  # of queries and keys
    kept: Sequence[Tensor]  # other inputs, such as positions: the same in each call

    @classmethod
    def of(cls, builder: ProblemBuilder) -> "_Prepared | None":
        """The problem of a builder with all its outputs.

        None if it reads copies of the inputs, or if there is nothing to compute.
        """
        inputs, outputs, problem = builder.inputs, builder.outputs, builder.problem
        if builder.copied or not all(x.numel() for x in (inputs["q"], inputs["k"])):
            return None
        return cls(
            problem=problem,
            pairs=problem.B * problem.H * problem.T * problem.S,
            lengths=[(name, stop - start) for start, stop, name in builder.spans[:3]],
            outputs=[(name, _allocation(x)) for name, x in outputs.items()],
            kept=[x for name, x in inputs.items() if name not in ("q", "k", "v")],
        )

    def solve(self, given: AttentionProblem) -> tuple[Named, bool]:
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
        outputs = {}
        for name, allocate in self.outputs:
            outputs[name] = x = allocate()
            setattr(problem, name, x.data_ptr())
        problem.threads = n_threads(self.pairs)
        return outputs, run(problem)


def _allocation(like: Tensor) -> partial[Tensor]:
    """What allocates a tensor like this one."""
    return partial(
        torch.empty_strided, tuple(like.shape), like.stride(), dtype=like.dtype, device=like.device
    )
