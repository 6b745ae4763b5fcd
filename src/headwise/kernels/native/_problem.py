"""The problems that the native kernel solves: fields, tensors behind pointers, and the call.

C++ trusts every pointer and size, so all of them are checked here. Outputs are allocated here too:
new memory overlaps with nothing that is read.
"""

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from headwise._display import type_of
from headwise._native_library import DONE, NO_MEMORY, NOT_FINITE, Problem, library
from headwise._torch_private import is_plain
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels._contract import (
    AttentionProblem,
    ComputeHeads,
    Named,
    RowRequest,
    RowStatistics,
    check_sizes,
    guard_nonfinite,
)
from headwise.kernels._rule import AttentionRule, Lowered, check_rule, lower

# The dtypes that the kernel reads, and their numbers in `ElementType`.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Positions and counts are 32-bit numbers in a lane, and bytes of an array 64-bit ones.
MOST_TOKENS, MOST_BYTES = 2**31 - 2**10, 2**62
# Pairs of queries and keys up to which waking a second thread costs more than it gains. Where few
# queries are packed, keys come from memory: it gains from these pairs times the width of a head on.
ONE_THREAD, ONE_THREAD_PACKED = (1 << 15) + 1, 3 << 14
# Wider than any window, and sums with it do not overflow 64 bits.
NO_LIMIT = 1 << 40
# How many elements the kernel may read beyond the end of a table: a tile of queries.
MARGIN = 64
# The address of empty tensors: a null pointer would mean that there is none.
_NOWHERE = torch.zeros(64)
# After a fork the pool of threads is gone, and waiting for it would hang.
_threads = {"most": 1 << 20}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _threads.update(most=1))


class NativeProblem:
    """A problem, and the tensors that its pointers refer to.

    Queries, keys and values are copied where they are not aligned, or not dense in their last axis.
    """

    def __init__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
        packed: bool = False,
    ) -> None:
        if q.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise ArgumentError(f"native: q is {q.dtype}. The kernel takes {names}.")
        check_sizes(q, k, v)
        check_counts(q.shape, k.shape, v.shape)
        (B, H, T, D), (_, Hkv, S, Dv) = q.shape, v.shape
        self.fields = Problem(
            dtype=DTYPES[q.dtype], B=B, H=H, Hkv=Hkv, T=T, S=S, D=D, Dv=Dv, packed=packed
        )
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            x = dense_last(x)
            x = x if x.data_ptr() % x.itemsize == 0 else x.clone()
            self.add_input(name, x, x.shape, q.dtype, strided_axes=3)

    def add_input(
        self,
        name: str,
        x: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strided_axes: int = 0,
    ) -> None:
        """Add an input: a tensor that is dense except for its first, strided axes."""
        check_tensor(name, x, shape, dtype, strided_axes)
        self._point(name, x, strided_axes)
        self.inputs[name] = x

    def add_output(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        by_token: bool = False,
    ) -> Tensor:
        """Allocate an output: dense, or in the layout of torch's kernel.

        There the heads of a token lie side by side.
        """
        # New tensors go to the device of the queries, whatever the default is.
        if by_token:
            _, H, T, D = shape
            strides = T * H * D, D, H * D, 1
            x = self.inputs["q"].new_empty_strided(shape, strides, dtype=dtype)
        else:
            x = self.inputs["q"].new_empty(shape, dtype=dtype)
        self.outputs[name] = x
        self._point(name, x, strided_axes=3 if by_token else 0)
        return x

    def solve(self, function: str = "headwise_forward") -> bool:
        """Run the kernel. Returns whether all requested heads are finite.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        self.fields.threads = n_threads(self.fields)
        outcome = getattr(library().functions, function)(ctypes.byref(self.fields))
        if outcome == NO_MEMORY:
            names = ("B", "H", "Hkv", "T", "S", "D", "Dv")
            sizes = {name: getattr(self.fields, name) for name in names}
            raise MemoryError(f"native: out of memory for a problem of sizes {sizes}.")
        return bool(outcome != NOT_FINITE)

    def _point(self, name: str, x: Tensor, strided_axes: int = 0) -> None:
        setattr(self.fields, name, x.data_ptr() or _NOWHERE.data_ptr())
        if strided_axes:
            setattr(self.fields, f"{name}_stride", x.stride()[:strided_axes])


def n_threads(problem: Problem) -> int:
    """The number of threads: those of torch, where a second one gains more than waking it costs."""
    size, least = problem.B * problem.H * problem.T * problem.S, ONE_THREAD
    if problem.packed:
        size, least = size * problem.D, ONE_THREAD_PACKED
    return most_threads() if size >= least else 1


def most_threads() -> int:
    """The threads of torch; 1 after a fork."""
    return min(torch.get_num_threads(), _threads["most"])


def check_counts(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Refuse sizes that do not fit into the integers of the kernel.

    Raises:
        ShapeError: there are too many tokens, or an array would be too large.
    """
    T, S = q[2], k[2]
    if T + S > MOST_TOKENS:
        raise ShapeError(
            f"native: {T} queries and {S} keys are more than {MOST_TOKENS} together. "
            f"Use backend='rows'."
        )
    for name, shape in (("q", q), ("k", k), ("v", v)):
        # Steps over an axis are counted also where another axis is empty.
        entries = math.prod(shape) or math.prod(length or 1 for length in shape)
        if 8 * entries > MOST_BYTES:
            raise ShapeError(
                f"native: {name} of shape {tuple(shape)} is too large to be counted in bytes. "
                f"Use backend='rows'."
            )


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strided_axes: int = 0
) -> None:
    """Refuse a tensor that is not an array of this shape and dtype, dense but for its first axes.

    Raises:
        ArgumentError: the dtype, device, kind, layout or alignment is another, or its memory is
            too short.
        ShapeError: the shape is another.
    """
    if x.shape != shape:
        raise ShapeError(f"native: {name} has shape {tuple(x.shape)} instead of {tuple(shape)}.")
    if x.dtype != dtype or not x.is_cpu:
        raise ArgumentError(
            f"native: {name} is {x.dtype} on {x.device}. The kernel takes {dtype} on the CPU."
        )
    if not is_plain(x):
        raise ArgumentError(
            f"native: {name} is {type_of(x)}, whose numbers may not be in memory. "
            f"Give a plain tensor."
        )
    start, length = x.data_ptr(), reach(shape, x.stride())
    # A tensor keeps its shape when its memory is freed or made smaller, as sharding does.
    stop = (x.storage_offset() + length) * x.itemsize
    if length and (not start or stop > x.untyped_storage().nbytes()):
        raise ArgumentError(
            f"native: {name} of shape {tuple(x.shape)} is not in memory: its numbers would end at "
            f"byte {stop} of {x.untyped_storage().nbytes() if start else 0}. "
            f"Give a tensor whose memory was not freed."
        )
    if not (x.is_contiguous() or (strided_axes and has_dense_rows(x))):
        raise ArgumentError(
            f"native: {name} has strides of {x.stride()}, but its "
            f"{'last axis is' if strided_axes else 'axes are'} read as dense. "
            f"Give {name}.contiguous()."
        )
    if start % x.itemsize:
        raise ArgumentError(
            f"native: {name} begins at byte {start}, which is not a multiple of {x.itemsize}. "
            f"Give an aligned copy: {name}.clone()."
        )


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements in memory from the first of an array to its last."""
    return 0 if 0 in shape else 1 + sum(map(mul, shape, strides)) - sum(strides)


def has_dense_rows(x: Tensor) -> bool:
    """Whether the last axis of a tensor is dense."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or 0 in x.shape


def dense_last(x: Tensor) -> Tensor:
    """The tensor, copied if its last axis is not dense."""
    return x if has_dense_rows(x) else x.contiguous()


def compute_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    lowered: Lowered,
    rows: Sequence[str] = (),
    packed: bool = False,
) -> tuple[Named, bool]:
    """The `heads`, the named statistics of their rows, and whether all heads are finite."""
    problem = problem_of_heads(q, k, v, lowered, rows, packed)
    finite = problem.solve()
    return problem.outputs, finite


def problem_of_heads(
    q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, rows: Sequence[str], packed: bool
) -> NativeProblem:
    """The problem of heads and some statistics of their rows."""
    problem = NativeProblem(q, k, v, packed)
    add_rule(problem, lowered)
    problem.add_output("heads", (*q.shape[:3], v.shape[3]), q.dtype, by_token=True)
    for name in rows:
        problem.add_output(name, q.shape[:3])
    return problem


def prepare_heads(
    q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, packed: bool, is_masked: bool
) -> ComputeHeads | None:
    """What computes the heads of tensors of these sizes and strides: only addresses are new.

    It returns None where tensors are not aligned or not in memory, and where a masked value may
    have reached the heads.
    """
    problem = problem_of_heads(q, k, v, lowered, (), packed)
    if any(problem.inputs[name] is not x for name, x in (("q", q), ("k", k), ("v", v))):
        return None  # it reads copies
    fields, item = problem.fields, q.itemsize
    functions: Any = library().functions
    kernel = functions.headwise_heads
    pointer, heads = ctypes.byref(fields), problem.outputs["heads"]
    shape, strides = heads.shape, heads.stride()
    q_length, k_length, v_length = (reach(x.shape, x.stride()) for x in (q, k, v))
    expected = (DONE,) if is_masked else (DONE, NOT_FINITE)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (
            (q_start | k_start | v_start) % item
            or (q.storage_offset() + q_length) * item > q.untyped_storage().nbytes()
            or (k.storage_offset() + k_length) * item > k.untyped_storage().nbytes()
            or (v.storage_offset() + v_length) * item > v.untyped_storage().nbytes()
        ):
            return None
        heads = q.new_empty_strided(shape, strides)
        threads = n_threads(fields)
        done = kernel(pointer, q_start, k_start, v_start, heads.data_ptr(), threads) in expected
        return heads if done else None

    return compute


def compute_gradients(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    lowered: Lowered,
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from those of heads, log-sum-exp and entropy.

    Each has the dtype of its input. `grads` is None for a result without a gradient.
    """
    problem = NativeProblem(q, k, v)
    add_rule(problem, lowered)
    heads = dense_last(results[0])
    grad_heads = torch.zeros_like(heads) if grads[0] is None else dense_last(grads[0])
    problem.add_input("heads", heads, heads.shape, q.dtype, strided_axes=3)
    problem.add_input("grad_heads", grad_heads, heads.shape, q.dtype, strided_axes=3)
    for name, rows, grad in zip(("lse", "entropy"), results[1:], grads[1:], strict=False):
        problem.add_input(name, rows.contiguous(), q.shape[:3])
        if grad is not None:
            problem.add_input(f"grad_{name}", grad.contiguous(), q.shape[:3])
    # The gradient of a query is a sum over several tasks, and rounded only at its end.
    dq = problem.add_output("dq", q.shape, by_token=True)
    dk = problem.add_output("dk", k.shape, k.dtype, by_token=True)
    dv = problem.add_output("dv", v.shape, v.dtype, by_token=True)
    problem.solve("headwise_backward")
    return dq.to(q.dtype), dk, dv


def compute_statistics(
    problem: AttentionProblem, request: RowRequest, packed: bool
) -> RowStatistics:
    """Statistics of the weights of every row, from one pass over the keys."""
    q, k, v, rule, *_ = problem
    described = problem_of_rows(q, k, v, rule, request, packed)
    finite, outputs = described.solve(), described.outputs
    if not finite and request.heads and rule.visible is not None:
        # The kernel multiplies masked values by 0, and 0 · NaN is NaN.
        safe = guard_nonfinite(problem)
        described = problem_of_rows(q, k, safe.problem.v, rule, request, packed)
        described.solve()
        outputs = described.outputs | {"heads": safe.mark(described.outputs["heads"])}
    return RowStatistics(**outputs, kernel=f"native ({library().name})")


def problem_of_rows(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest, packed: bool = False
) -> NativeProblem:
    """The problem of statistics of rows."""
    check_rule(rule, q, k)
    (B, H, T, _), S = q.shape, k.shape[2]
    if request.distance and (request.query_at is None or request.key_at is None):
        # Without positions the last query is at the last key.
        query_at = torch.arange(S - T, S, device="cpu").expand(B, T)
        key_at = torch.arange(S, device="cpu").expand(B, S)
        request = replace(request, query_at=query_at, key_at=key_at)
    problem = NativeProblem(q, k, v if request.heads else v[..., :0], packed)
    add_rule(problem, lower(rule, T, S))
    for name, x in request.inputs(B, S, torch.device("cpu")).items():
        problem.add_input(name, x, x.shape, x.dtype)
    for name, (shape, dtype) in request.outputs((B, H, T), rule.sinks is not None).items():
        problem.add_output(name, shape, dtype)
    problem.fields.N = 0 if request.keys is None else request.keys.shape[2]
    problem.fields.C = 0 if request.classes is None else request.classes.shape[2]
    if request.heads:
        problem.add_output("heads", (B, H, T, v.shape[3]), q.dtype, by_token=True)
    if request.received is not None:
        problem.add_output("received", (B, H, S)).zero_()  # the kernel adds to it
    return problem


def add_rule(problem: NativeProblem, lowered: Lowered) -> None:
    """Add a lowered rule to a problem.

    Raises:
        ArgumentError: a window is negative, or a mask is not boolean.
        ShapeError: a tensor does not fit the lengths.
    """
    fields = problem.fields
    fields.scale, fields.softcap = lowered.scale, lowered.softcap
    for name, n in (("left", lowered.left), ("right", lowered.right)):
        if n is not None and n < 0:
            raise ArgumentError(f"native: {name}={n}. Give a number of keys, 0 or more, or None.")
        setattr(fields, name, NO_LIMIT if n is None else min(n, NO_LIMIT))
    if not lowered.tensors:
        return
    B, H, T, S = (getattr(fields, name) for name in "BHTS")

    def add(name: str, x: Tensor, shape: tuple[int, ...], strided_axes: int = 0) -> None:
        problem.add_input(name, _spread(name, x, shape, strided_axes), shape, x.dtype, strided_axes)

    if lowered.key_range is not None:
        add("key_range", lowered.key_range.to(torch.int64).clamp(0, S), (B, 2))
    if lowered.documents is not None:
        if T > S:
            raise ShapeError(f"native: documents of {S} keys for {T} queries. Give no more.")
        _, numbers = torch.unique(lowered.documents, return_inverse=True)
        add("documents", numbers.to(torch.int32), (B, S))
    if lowered.mask is not None:
        if lowered.mask.dtype != torch.bool:
            raise ArgumentError(f"native: a mask of {lowered.mask.dtype}. Give booleans.")
        add("mask", lowered.mask.view(torch.uint8), (B, H, T, S), strided_axes=3)
    if lowered.sinks is not None:
        problem.add_input("sinks", lowered.sinks.detach().float().contiguous(), (H,))
    if lowered.by_distance is not None:
        n = T + S - 1
        _check_fit("by_distance", lowered.by_distance, (B, H, n))
        padded = F.pad(lowered.by_distance.detach().float(), (0, MARGIN))
        add("by_distance", padded, (B, H, n + MARGIN), strided_axes=2)
    if lowered.bias is not None:
        add("bias", lowered.bias.detach().float(), (B, H, T, S), strided_axes=3)


def _spread(name: str, x: Tensor, shape: tuple[int, ...], strided_axes: int = 0) -> Tensor:
    """Broadcast by strides of 0, except the axes that the kernel reads as dense."""
    _check_fit(name, x, shape)
    x = x.to("cpu").expand(*x.shape[:strided_axes], *shape[strided_axes:])
    if strided_axes == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    return x.expand(shape)


def _check_fit(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    fits = x.ndim == len(shape)
    if not fits or any(n not in (1, size) for n, size in zip(x.shape, shape, strict=True)):
        raise ShapeError(
            f"native: {name} has shape {tuple(x.shape)} instead of {shape}, or ones to broadcast."
        )
