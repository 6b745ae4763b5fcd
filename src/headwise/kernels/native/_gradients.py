"""The native kernel in autograd: gradients through heads, log-sum-exp and entropy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._torch_private import can_read, is_traced, needs_gradient
from headwise.kernels.native._compute import compute_gradients, compute_heads
from headwise.kernels.rows import attend_rows
from headwise.kernels.spec import (
    AttentionProblem,
    AttentionRule,
    Lowered,
    Named,
    compute_guarded,
    guard_nonfinite,
    lower,
)

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
