"""Heads, gradients and statistics of rows by the native kernel: its problem, built and solved."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise._library import library
from headwise._torch_private import (
    can_read,
    constant_when_traced,
    is_fake,
    is_plain,
    is_traced,
    needs_gradient,
)
from headwise.kernels.native._builder import DTYPES, ProblemBuilder
from headwise.kernels.native._check import dense_last
from headwise.kernels.native._prepared import as_statistics
from headwise.kernels.native._rule import add_lowered, add_rule
from headwise.kernels.spec import (
    AttentionProblem,
    AttentionRule,
    Lowered,
    Named,
    RowRequest,
    RowStatistics,
    check_rule,
    guard_nonfinite,
    why_not_lowered,
)

# Queries of a head up to which the heads of a group fill the lanes of a vector better.
FEW = 8


def why_not_native(problem: AttentionProblem) -> str | None:
    """Why the native kernel cannot compute this; None if it can. Never reads tensor values."""
    q, k, v, rule, *_ = problem
    why = _why_no_library()
    if why is not None:
        return why
    if q.dtype not in DTYPES or not (q.dtype == k.dtype == v.dtype):
        return f"it does not compute in {q.dtype}"
    if not (_takes(q) and _takes(k) and _takes(v)):
        return "these are not plain tensors on a CPU"
    return why_not_lowered(rule, q.shape[2], k.shape[2])


def why_not_native_statistics(problem: AttentionProblem) -> str | None:
    """Why it cannot compute statistics: they have no operator, so tensors must have values."""
    q, k, v, rule, *_ = problem
    why = why_not_native(problem)
    if why is None and not can_read(q, k, v, *rule.sample(q.shape[2], k.shape[2])):
        return "queries, keys, a mask, bias or sink are mapped over, or traced"
    return why


@constant_when_traced
def _why_no_library() -> str | None:
    return None if library() else library().why


def _takes(x: Tensor) -> bool:
    """Whether the kernel takes such a tensor, as an operator where it is traced."""
    if torch.compiler.is_compiling() or is_fake(x):
        return x.device.type == "cpu"
    return x.is_cpu and is_plain(x)


def is_packed(n_queries: int, *inputs: Tensor | None) -> bool:
    """Whether the few queries of all heads of a group are packed, so that keys are read once.

    Not in training, where the backward pass must recompute the same logits to the last bit; nor
    while being traced, since an operator does not know whether it is trained.
    """
    tensors = [x for x in inputs if x is not None]
    if torch.compiler.is_compiling() or not 0 < n_queries <= FEW:
        return False
    return can_read(*tensors) and not (is_traced() or needs_gradient(*tensors))


class Heads(NamedTuple):
    """Heads, log-sum-exp, and the entropy if it was requested."""

    results: tuple[Tensor, ...]
    finite: bool  # whether all heads are


def compute_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    lowered: Lowered,
    entropy: bool = False,
    packed: bool = False,
) -> Heads:
    """Heads, log-sum-exp, and the entropy if requested, of tensors with values."""
    rows = ("lse", "entropy") if entropy else ("lse",)
    builder = build_heads(q, k, v, lowered, packed, rows)
    finite = builder.solve()
    return Heads(tuple(builder.outputs.values()), finite)


def build_heads(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    lowered: Lowered,
    packed: bool,
    rows: Sequence[str],
) -> ProblemBuilder:
    """The problem of heads and some statistics of their rows."""
    builder = ProblemBuilder.of(q, k, v)
    builder.set("packed", packed)
    add_lowered(builder, lowered)
    B, H, T, _ = q.shape
    add_output_by_token(builder, "heads", (B, H, T, v.shape[3]))
    for name in rows:
        builder.add_output(name, (B, H, T))
    return builder


def compute_gradients(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    lowered: Lowered,
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from those of the results of `compute_heads`.

    Each has the dtype of its input. `grads` is None for a result without a gradient.
    """
    builder = ProblemBuilder.of(q, k, v)
    add_lowered(builder, lowered)
    grad_heads = torch.zeros_like(results[0]) if grads[0] is None else grads[0]
    heads, grad_heads = dense_last((results[0], grad_heads))
    builder.add_input("heads", heads, heads.shape, q.dtype, strided_axes=3)
    builder.add_input("grad_heads", grad_heads, heads.shape, q.dtype, strided_axes=3)
    for name, rows, grad in zip(("lse", "entropy"), results[1:], grads[1:], strict=False):
        builder.add_input(name, rows.contiguous(), q.shape[:3])
        if grad is not None:
            builder.add_input(f"grad_{name}", grad.contiguous(), q.shape[:3])
    # The gradient of a query is a sum over several tasks, and rounded only at its end.
    dq = add_output_by_token(builder, "dq", q.shape, torch.float32)
    dk, dv = (add_output_by_token(builder, name, x.shape) for name, x in (("dk", k), ("dv", v)))
    builder.solve("headwise_backward")
    return dq.to(q.dtype), dk, dv


def add_output_by_token(
    builder: ProblemBuilder, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Float[Tensor, "B H T _"]:
    """Add an output in the layout of torch's kernel: the heads of a token side by side."""
    _, H, T, D = shape
    dtype = dtype or builder.inputs["q"].dtype
    return builder.add_output(name, shape, dtype, strides=(T * H * D, D, H * D, 1), strided_axes=3)


def native_statistics(problem: AttentionProblem, request: RowRequest) -> RowStatistics:
    """Statistics of the weights of every row, from one pass over the keys."""
    q, k, v, rule, *_ = problem
    check_rule(rule, q, k)
    results, finite = _describe(q, k, v if request.heads else v[..., :0], rule, request)
    if results.heads is None or rule.visible is None or finite:
        return results
    # The kernel multiplies masked values by 0, and 0 · NaN is NaN.
    safe = guard_nonfinite(problem)
    results, _ = _describe(q, k, safe.problem.v, rule, request)
    return replace(results, heads=None if results.heads is None else safe.mark(results.heads))


def _describe(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest
) -> tuple[RowStatistics, bool]:
    """The statistics, and whether the heads among them are finite."""
    builder, results = build_statistics(q, k, v, rule, request)
    finite = builder.solve()
    return as_statistics(results), finite


def build_statistics(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, request: RowRequest
) -> tuple[ProblemBuilder, Named]:
    """The problem of statistics of rows, and the outputs that will hold them."""
    builder = ProblemBuilder.of(q, k, v)
    # What keys receive is summed over tiles of queries of one head.
    builder.set("packed", request.received is None and is_packed(q.shape[2], q, k, v))
    add_rule(builder, rule)
    results = _add_rows(builder, rule, request)
    if request.keys is not None:
        results |= _add_keys(builder, request, request.keys)
    if request.classes is not None:
        results |= _add_classes(builder, request, request.classes)
    if request.heads:
        results["heads"] = add_output_by_token(builder, "heads", (*q.shape[:3], v.shape[3]))
    if request.received is not None:
        results["received"] = _add_received(builder, request.received)
    return builder, results


def _add_rows(builder: ProblemBuilder, rule: AttentionRule, request: RowRequest) -> Named:
    """Add the statistics of a row as a whole."""
    B, H, T, S = (builder.sizes[name] for name in "BHTS")
    rows = (B, H, T)
    results = {"n_keys": builder.add_output("n_keys", rows, torch.int64)}
    requested = {
        "lse": True, "max_logit": True, "max_weight": True, "sink": rule.sinks is not None,
        "entropy": request.entropy, "participation": request.participation,
        "distance": request.distance, "even_distance": request.distance,
    }  # fmt: skip
    results |= {
        name: builder.add_output(name, rows)
        for name, is_requested in requested.items()
        if is_requested
    }
    if request.argmax:
        results["argmax"] = builder.add_output("argmax", rows, torch.int64)
    if request.distance:
        positions = _positions(request, B, T, S)
        builder.add_input("query_at", positions.queries, (B, T))
        builder.add_input("key_at", positions.keys, (B, S))
    return results


class _Positions(NamedTuple):
    queries: Float[Tensor, "B T"]
    keys: Float[Tensor, "B S"]


def _positions(request: RowRequest, B: int, T: int, S: int) -> _Positions:
    """Positions of queries and keys; without any the last query is at the last key."""
    if request.query_at is None or request.key_at is None:
        queries, keys = torch.arange(S - T, S)[None], torch.arange(S)[None]
    else:
        queries, keys = request.query_at, request.key_at
    return _Positions(
        queries.to("cpu", torch.float32).expand(B, T).contiguous(),
        keys.to("cpu", torch.float32).expand(B, S).contiguous(),
    )


def _add_keys(builder: ProblemBuilder, request: RowRequest, keys: Int[Tensor, "B T N"]) -> Named:
    B, H, T, S = (builder.sizes[name] for name in "BHTS")
    N = keys.shape[-1]
    builder.set("N", N)
    indices = keys.clamp(-1, S).to(torch.int32).expand(B, T, N).contiguous()  # S is no key either
    builder.add_input("keys", indices, (B, T, N), torch.int32)
    results = {"key_seen": builder.add_output("key_seen", (B, H, T, N), torch.bool)}
    for name in _measures(builder, request):
        results[f"key_{name}"] = builder.add_output(f"key_{name}", (B, H, T, N))
    return results


def _add_classes(
    builder: ProblemBuilder, request: RowRequest, classes: Float[Tensor, "B S C"]
) -> Named:
    B, H, T, S = (builder.sizes[name] for name in "BHTS")
    C = classes.shape[-1]
    builder.set("C", C)
    classes = classes.to(torch.float32).expand(B, S, C).contiguous()
    builder.add_input("classes", classes, (B, S, C))
    names = ("keys", *_measures(builder, request))
    return {f"class_{name}": builder.add_output(f"class_{name}", (B, H, T, C)) for name in names}


def _measures(builder: ProblemBuilder, request: RowRequest) -> list[str]:
    """Add inputs of the measures of single keys and classes, and name these measures."""
    measures = ["mass"]
    if request.top:
        measures.append("top")
    if request.key_norms is not None:
        measures.append("share")
        if "key_norms" not in builder.inputs:
            norms = request.key_norms.to(torch.float32)
            norms = norms.where(norms.isfinite(), 0.0).contiguous()
            B, H, S = (builder.sizes[name] for name in "BHS")
            builder.add_input("key_norms", norms, (B, H, S))
    return measures


def _add_received(builder: ProblemBuilder, counted: Bool[Tensor, "B T"]) -> Float[Tensor, "B H S"]:
    B, H, T, S = (builder.sizes[name] for name in "BHTS")
    bytes_ = counted.expand(B, T).to(torch.uint8).contiguous()
    builder.add_input("counted", bytes_, (B, T), torch.uint8)
    return builder.add_output("received", (B, H, S)).zero_()  # the kernel adds to it
