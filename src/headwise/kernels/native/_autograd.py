"""The native kernel in autograd, and as operators for compilers, exporters and vmap."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.library import custom_op

from headwise._native_library import library
from headwise._torch_private import can_read, is_traced, needs_gradient
from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels._contract import AttentionProblem, Named, compute_guarded, guard_nonfinite
from headwise.kernels._rule import AttentionRule, Lowered, lower, rule_from_lowered
from headwise.kernels.native._problem import compute_gradients, compute_heads
from headwise.kernels.rows import attend_rows

_RESULTS = ("heads", "lse", "entropy")


def attend_native(problem: AttentionProblem, packed: bool) -> Named:
    """The `heads` and, if there are extras, their `lse` and `entropy`, these in float32.

    Masked values have no effect. Queries, keys, values and sinks get gradients, a bias does not.
    Second derivatives are left to PyTorch, which computes all this again for them.
    """
    q, k, v, rule, _, extras = problem
    lowered = lower(rule, q.shape[2], k.shape[2])
    learned = (q, k, v) if rule.sinks is None else (q, k, v, rule.sinks)
    # Values cannot be read inside vmap, and not while being traced.
    traced = not can_read(q, k, v, *lowered.tensors) or is_traced()
    if traced or needs_gradient(*learned):
        return compute_guarded(partial(_in_graph, lowered=lowered, traced=traced), problem)
    rows = _RESULTS[1 : 2 + extras.entropy] if any(extras) else ()
    results, finite = compute_heads(q, k, v, lowered, rows, packed)
    if finite or rule.visible is None:
        return results
    safe = guard_nonfinite(problem)
    results, _ = compute_heads(*safe.problem[:3], lowered, rows, packed)
    return {name: safe.mark(x) for name, x in results.items()}


def _in_graph(problem: AttentionProblem, lowered: Lowered, traced: bool) -> Named:
    """The results as part of a graph: of autograd, or of a tracer."""
    q, k, v, rule, *_ = problem
    entropy = problem.extras.entropy
    if traced:
        results = torch.ops.headwise.attention(q, k, v, entropy, *lowered)[: 2 + entropy]
    else:
        sinks = None if rule.sinks is None else rule.sinks.float()
        results = _Attend.apply(q, k, v, sinks, rule, lowered, entropy)  # type: ignore[no-untyped-call]
    return dict(zip(_RESULTS, results, strict=False))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: AttentionRule,
        lowered: Lowered,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        named, _ = compute_heads(q, k, v, lowered, _RESULTS[1 : 2 + entropy])
        results = tuple(named.values())
        ctx.rule, ctx.lowered = rule, lowered
        ctx.save_for_backward(q, k, v, sinks, *results)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *results = ctx.saved_tensors
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # create_graph: these gradients will be differentiated
            present = {name: x for name, x in zip(_RESULTS, grads, strict=False) if x is not None}
            gradients = _recomputed((q, k, v, sinks), ctx.needs_input_grad[:4], ctx.rule, present)
        elif can_read(*(x for x in grads if x is not None)):
            gradients = [*compute_gradients(q, k, v, ctx.lowered, results, grads), None]
            if ctx.needs_input_grad[3]:
                gradients[3] = sinks_gradient(sinks, results, grads)
        else:  # a batch of gradients at once (is_grads_batched)
            lowered = ctx.lowered._replace(sinks=sinks)
            flat = (x for part in (results, grads) for x in [*part, None][:3])
            *gradients, of_sinks = torch.ops.headwise.attention_backward(q, k, v, *flat, *lowered)
            gradients = [*gradients, None if sinks is None else of_sinks]
        return *gradients, None, None, None


def sinks_gradient(
    sinks: Float[Tensor, " H"], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Float[Tensor, " H"]:
    """The gradient of sinks, each one more key with a value of 0 and no part in the entropy."""
    # With the mass m that a row loses to its sink, the slopes along the sink are -m · heads,
    # m for lse, and m (1 - m - entropy) for the entropy, since each weight p falls by p m.
    heads, lse, *_ = results
    mass = (sinks[:, None] - lse).exp().nan_to_num(0.0)  # of -inf, in a row without keys
    rise = torch.zeros_like(lse)
    if grads[0] is not None:
        rise = rise - (grads[0].float() * heads.float()).sum(-1)
    if grads[1] is not None:
        rise = rise + grads[1]
    if len(results) > 2 and grads[2] is not None:
        rise = rise + grads[2] * (1 - mass - results[2])
    return (mass * rise).sum((0, 2))


def _recomputed(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    needed: tuple[bool, ...],
    rule: AttentionRule,
    grads: Named,
) -> list[Tensor | None]:
    """The same gradients computed by PyTorch, which can differentiate them again."""
    # Views, so that each is a variable of its own even where one is, or depends on, another.
    q, k, v = (x.view_as(x) for x in inputs[:3])
    sinks = None if inputs[3] is None else inputs[3].view_as(inputs[3])
    results = attend_rows(q, k, v, replace(rule, sinks=sinks), entropy="entropy" in grads)
    alone = zip((q, k, v, sinks), needed, strict=True)
    learned = [x for x, is_needed in alone if is_needed and x is not None]
    outputs = [results[name] for name in grads]
    gradients = iter(
        torch.autograd.grad(
            outputs, learned, [*grads.values()], create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if is_needed else None for is_needed in needed]


# The fields of `Lowered`, in their order: the last arguments, and of them the sinks come last.
_RULE_SCHEMA = (
    "float scale, float softcap, SymInt? left, SymInt? right, Tensor? key_range, "
    "Tensor? documents, Tensor? mask, Tensor? bias, Tensor? by_distance, Tensor? sinks"
)


@custom_op(
    "headwise::attention",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor q, Tensor k, Tensor v, bool entropy, {_RULE_SCHEMA}) "
    "-> (Tensor heads, Tensor lse, Tensor entropies)",
)
def attention(q: Tensor, k: Tensor, v: Tensor, entropy: bool, *lowered: Any) -> tuple[Tensor, ...]:
    """Heads, log-sum-exp and entropy of every row; entropies are empty unless requested.

    Without a native kernel, which an exported program may meet on another machine, PyTorch
    computes them.
    """
    if library():
        rows = ("lse", "entropy") if entropy else ("lse",)
        results, _ = compute_heads(q, k, v, Lowered(*lowered), rows)
    else:
        rule = rule_from_lowered(Lowered(*lowered), q.shape[2], k.shape[2])
        results = attend_rows(q, k, v, rule, entropy=entropy)
        results["heads"] = results["heads"].transpose(1, 2).contiguous().transpose(1, 2)
    none = q.new_empty(*q.shape[:2], 0, dtype=torch.float32)
    return results["heads"], results["lse"], results.get("entropy", none)


@attention.register_fake
def _like_attention(
    q: Tensor, k: Tensor, v: Tensor, entropy: bool, *lowered: Any
) -> tuple[Tensor, ...]:
    B, H, T, _ = q.shape
    rows = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, T if entropy else 0))
    return _by_token(q, v.shape[3]), *rows


@custom_op(
    "headwise::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor q, Tensor k, Tensor v, Tensor heads, Tensor lse, Tensor? entropies, "
    f"Tensor? d_heads, Tensor? d_lse, Tensor? d_entropies, {_RULE_SCHEMA}) "
    "-> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_sinks)",
)
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Tensor,
    lse: Tensor,
    entropies: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys, values and sinks; that of the sinks is empty without sinks."""
    if not library():
        raise UnsupportedError(
            f"native: there is no kernel for the backward pass ({library().why}). "
            f"Train where headwise was built with one, or with backend='fused'."
        )
    results = [heads, lse] if entropies is None else [heads, lse, entropies]
    grads, lowered = others[: len(results)], Lowered(*others[3:])
    gradients = compute_gradients(q, k, v, lowered, results, grads)
    if lowered.sinks is None:
        of_sinks = q.new_empty(q.shape[0], 0)
    else:
        of_sinks = sinks_gradient(lowered.sinks.float(), results, grads).to(lowered.sinks.dtype)
    return *gradients, of_sinks


@attention_backward.register_fake
def _like_backward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sinks = others[-1]
    gradients = (_by_token(x, x.shape[3]) for x in (q, k, v))
    return *gradients, q.new_empty(q.shape[0], 0) if sinks is None else torch.empty_like(sinks)


def _by_token(x: Tensor, width: int | torch.SymInt) -> Tensor:
    """The layout of heads and gradients: the heads of a token side by side."""
    B, H, T, _ = x.shape
    return x.new_empty(B, T, H, width).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, entropy, *lowered = inputs
    rule = Lowered(*lowered)
    for name in ("bias", "by_distance"):
        x = getattr(rule, name)
        if x is not None and x.requires_grad:
            raise ArgumentError(
                f"native: {name} requires gradients, which this kernel does not compute. "
                f"Give {name}.detach(), or use backend='fused'."
            )
    ctx.numbers = lowered[:4]
    heads, lse, entropies = output
    ctx.save_for_backward(q, k, v, heads, lse, entropies if entropy else None, *lowered[4:])
    ctx.set_materialize_grads(False)


def _go_back(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *known, key_range, documents, mask, bias, by_distance, sinks = ctx.saved_tensors
    lowered = (*ctx.numbers, key_range, documents, mask, bias, by_distance, sinks)
    *gradients, of_sinks = attention_backward(*known, *grads, *lowered)
    return *gradients, *[None] * 10, None if sinks is None else of_sinks


attention.register_autograd(_go_back, setup_context=_keep)


def _map(
    operator: Callable[..., tuple[Tensor, ...]],
    info: Any,
    in_dims: Sequence[int | None],
    *inputs: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """One call for each entry of a mapped axis: the batch is there for a single one."""
    each = []
    for n in range(info.batch_size):
        pairs = zip(inputs, in_dims, strict=True)
        each.append(operator(*(x if axis is None else x.select(axis, n) for x, axis in pairs)))
    results = tuple(torch.stack(x) for x in zip(*each, strict=True))
    return results, (0,) * len(results)


attention.register_vmap(partial(_map, attention))
attention_backward.register_vmap(partial(_map, attention_backward))
