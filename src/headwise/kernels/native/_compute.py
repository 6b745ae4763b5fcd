"""Heads, gradients and statistics of rows by the native kernel."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from headwise._library import DONE, NOT_FINITE, library
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels.native._problem import NativeProblem, dense_last, n_threads, reach
from headwise.kernels.spec import (
    AttentionProblem,
    AttentionRule,
    ComputeHeads,
    Lowered,
    Named,
    RowRequest,
    RowStatistics,
    check_rule,
    guard_nonfinite,
    lower,
)

# Wider than any window, and sums with it do not overflow 64 bits.
NO_LIMIT = 1 << 40
# How many elements the kernel may read beyond the end of a table: a tile of queries.
MARGIN = 64


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
    problem.add_output_by_token("heads", (*q.shape[:3], v.shape[3]))
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
    dq = problem.add_output_by_token("dq", q.shape, torch.float32)
    dk, dv = (problem.add_output_by_token(name, x.shape) for name, x in (("dk", k), ("dv", v)))
    problem.solve("headwise_backward")
    return dq.to(q.dtype), dk, dv


def compute_statistics(
    problem: AttentionProblem, request: RowRequest, packed: bool
) -> RowStatistics:
    """Statistics of the weights of every row, from one pass over the keys."""
    q, k, v, rule, *_ = problem
    described = problem_of_rows(q, k, v, rule, request, packed)
    if described.solve() or not request.heads or rule.visible is None:
        return _as_statistics(described.outputs)
    # The kernel multiplies masked values by 0, and 0 · NaN is NaN.
    safe = guard_nonfinite(problem)
    described = problem_of_rows(q, k, safe.problem.v, rule, request, packed)
    described.solve()
    outputs = described.outputs
    return _as_statistics(outputs | {"heads": safe.mark(outputs["heads"])})


def _as_statistics(outputs: Named) -> RowStatistics:
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
        problem.add_output_by_token("heads", (B, H, T, v.shape[3]))
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
    if lowered.tensors:
        _add_masks(problem, lowered)
        _add_biases(problem, lowered)


def _add_masks(problem: NativeProblem, lowered: Lowered) -> None:
    B, H, T, S = (getattr(problem.fields, name) for name in "BHTS")
    if lowered.key_range is not None:
        inside = lowered.key_range.to(torch.int64).clamp(0, S)
        problem.add_input("key_range", _spread("key_range", inside, (B, 2)), (B, 2), torch.int64)
    if lowered.documents is not None:
        if T > S:
            raise ShapeError(f"native: documents of {S} keys for {T} queries. Give no more.")
        _, numbers = torch.unique(lowered.documents, return_inverse=True)
        numbers = _spread("documents", numbers.to(torch.int32), (B, S))
        problem.add_input("documents", numbers, (B, S), torch.int32)
    if lowered.mask is not None:
        if lowered.mask.dtype != torch.bool:
            raise ArgumentError(f"native: a mask of {lowered.mask.dtype}. Give booleans.")
        mask = _spread("mask", lowered.mask, (B, H, T, S), strided_axes=3).view(torch.uint8)
        problem.add_input("mask", mask, (B, H, T, S), torch.uint8, strided_axes=3)


def _add_biases(problem: NativeProblem, lowered: Lowered) -> None:
    B, H, T, S = (getattr(problem.fields, name) for name in "BHTS")
    if lowered.sinks is not None:
        problem.add_input("sinks", lowered.sinks.detach().float().contiguous(), (H,))
    if lowered.by_distance is not None:
        n = T + S - 1
        _check_fit("by_distance", lowered.by_distance, (B, H, n))
        padded = F.pad(lowered.by_distance.detach().float(), (0, MARGIN))
        table = _spread("by_distance", padded, (B, H, n + MARGIN), strided_axes=2)
        problem.add_input("by_distance", table, (B, H, n + MARGIN), strided_axes=2)
    if lowered.bias is not None:
        bias = _spread("bias", lowered.bias.detach().float(), (B, H, T, S), strided_axes=3)
        problem.add_input("bias", bias, (B, H, T, S), strided_axes=3)


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
