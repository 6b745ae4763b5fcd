"""The kernel as operators, for compilers, exporters, autograd and `vmap`.

Eager calls of plain tensors bypass them: an operator costs more than the rest of a short call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from headwise._library import library
from headwise.errors import ArgumentError, UnsupportedError
from headwise.kernels.native._compute import compute_gradients, compute_heads
from headwise.kernels.native._gradients import sinks_gradient
from headwise.kernels.rows import attend_rows
from headwise.kernels.spec import Lowered, rule_from_lowered

# The fields of `Lowered`, in their order: the last arguments, and of them the sinks come last.
_RULE_SCHEMA = (
    "float scale, float softcap, SymInt? left, SymInt? right, Tensor? key_range, "
    "Tensor? documents, Tensor? mask, Tensor? bias, Tensor? by_distance, Tensor? sinks"
)
Dims = Sequence[int | None]
Operator = Callable[..., tuple[Tensor, ...]]


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
    operator: Operator, info: Any, in_dims: Dims, *inputs: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold a mapped axis into the batch. Sinks and their gradients have no batch: one call each."""
    N, sinks = info.batch_size, inputs[-1]
    if in_dims[-1] is not None or (operator is attention_backward and sinks is not None):
        each = [operator(*_one(inputs, in_dims, n)) for n in range(N)]
        results = tuple(torch.stack(x) for x in zip(*each, strict=True))
    else:
        q, axis = inputs[0], in_dims[0]
        B = q.shape[0] if axis is None else q.movedim(axis, 0).shape[1]
        folded = [
            _fold(x, axis, N, B) if isinstance(x, Tensor) else x
            for x, axis in zip(inputs[:-1], in_dims, strict=False)
        ]
        results = tuple(x.reshape(N, B, *x.shape[1:]) for x in operator(*folded, sinks))
    return results, (0,) * len(results)


attention.register_vmap(partial(_map, attention))
attention_backward.register_vmap(partial(_map, attention_backward))


def _one(inputs: Sequence[Any], in_dims: Dims, n: int) -> list[Any]:
    return [
        x if axis is None else x.select(axis, n) for x, axis in zip(inputs, in_dims, strict=True)
    ]


def _fold(x: Tensor, axis: int | None, N: int, B: int) -> Tensor:
    """Texts of all `N` batches of `B`, copied only where strides cannot express it."""
    if axis is None and x.shape[0] == 1:
        return x.expand(N * B, *x.shape[1:])
    x = x.unsqueeze(0) if axis is None else x.movedim(axis, 0)
    return x.expand(N, B, *x.shape[2:]).flatten(0, 1)
