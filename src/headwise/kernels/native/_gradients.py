"""The native kernel's heads with a way back: gradients through heads, lse and entropy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.kernels._guard import guard, shielded
from headwise.kernels._request import Named
from headwise.kernels._rule import Rule
from headwise.kernels._words import Words, words_of
from headwise.kernels.native._compute import compute_gradients, compute_heads, is_packed
from headwise.kernels.rows import attend_rows
from headwise.masks import can_look, is_recorded, is_trained

_FOUND = ("heads", "lse", "entropy")


def attend_native(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    entropy: bool = False,
) -> Named:
    """The `heads`, their `lse` and with `entropy` that too, these in float32.

    What is hidden reaches nothing. Gradients go to queries, keys, values and sinks, and to no
    bias. Those of gradients are left to PyTorch, which computes this again for them.
    """
    words, sinks = words_of(rule, q.shape[2], k.shape[2]), rule.sinks
    # Looking is allowed where numbers are in memory: not inside vmap, and not while being traced.
    traced = not can_look(q, k, v, *words.tensors) or is_recorded()
    if traced or is_trained(q, k, v) or (sinks is not None and is_trained(sinks)):
        learn = partial(_learn, rule=rule, words=words, entropy=entropy, traced=traced)
        return shielded(learn, q, k, v, rule)
    packed = is_packed(q.shape[2])
    found, finite = compute_heads(q, k, v, words, entropy, packed)
    if finite or rule.visible is None:
        return dict(zip(_FOUND, found, strict=False))
    safe = guard(q, k, v, rule)
    found, _ = compute_heads(safe.q, safe.k, safe.v, words, entropy, packed)
    return {name: safe.mark(rows) for name, rows in zip(_FOUND, found, strict=False)}


def _learn(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, words: Words, entropy: bool, traced: bool
) -> Named:
    """What is found, with its gradients or for whoever traces."""
    if traced:
        found = torch.ops.headwise.attention(q, k, v, entropy, *words)[: 2 + entropy]
    else:
        sinks = None if rule.sinks is None else rule.sinks.float()
        found = _Attend.apply(q, k, v, sinks, rule, words, entropy)  # type: ignore[no-untyped-call]
    return dict(zip(_FOUND, found, strict=False))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: Rule,
        words: Words,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        found, _ = compute_heads(q, k, v, words, entropy)
        ctx.rule, ctx.words = rule, words
        ctx.save_for_backward(q, k, v, sinks, *found)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *found = ctx.saved_tensors
        given: Sequence[Tensor | None]
        if torch.is_grad_enabled():  # gradients of these will be asked for
            some = {name: x for name, x in zip(_FOUND, grads, strict=False) if x is not None}
            given = _again((q, k, v, sinks), ctx.needs_input_grad[:4], ctx.rule, some)
        elif can_look(*(x for x in grads if x is not None)):
            given = [*compute_gradients(q, k, v, ctx.words, found, grads), None]
            if ctx.needs_input_grad[3]:
                given[3] = sinks_gradient(sinks, found, grads)
        else:  # many of them at once (is_grads_batched)
            words = ctx.words._replace(sinks=sinks)
            told = (x for some in (found, grads) for x in [*some, None][:3])
            *given, of_sinks = torch.ops.headwise.attention_backward(q, k, v, *told, *words)
            given = [*given, None if sinks is None else of_sinks]
        return *given, None, None, None


def sinks_gradient(
    sinks: Float[Tensor, " H"], found: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Float[Tensor, " H"]:
    """A sink is one more key, with a value of 0 and no part in the entropy."""
    heads, lse, *_ = found
    mass = (sinks[:, None] - lse).exp().nan_to_num(0.0)  # of -inf, in a row without keys
    rise = torch.zeros_like(lse)
    if grads[0] is not None:
        rise = rise - (grads[0].float() * heads.float()).sum(-1)
    if grads[1] is not None:
        rise = rise + grads[1]
    if len(found) > 2 and grads[2] is not None:
        rise = rise + grads[2] * (1 - mass - found[2])
    return (mass * rise).sum((0, 2))


def _again(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    needed: tuple[bool, ...],
    rule: Rule,
    grads: Named,
) -> list[Tensor | None]:
    """The same gradients from PyTorch, which knows theirs."""
    # Each for itself, even where one of them is another, or was computed from it.
    q, k, v = (x.view_as(x) for x in inputs[:3])
    sinks = None if inputs[3] is None else inputs[3].view_as(inputs[3])
    found = attend_rows(q, k, v, replace(rule, sinks=sinks), entropy="entropy" in grads)
    alone = zip((q, k, v, sinks), needed, strict=True)
    learned = [x for x, asked in alone if asked and x is not None]
    outputs = [found[name] for name in grads]
    given = iter(
        torch.autograd.grad(
            outputs, learned, [*grads.values()], create_graph=True, allow_unused=True
        )
    )
    return [next(given) if asked else None for asked in needed]
