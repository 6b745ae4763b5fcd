"""Hear attention that is written out: a softmax, and the product of its weights with values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import version_of
from headwise.kernels import RowRequest, RowStatistics, make_rule
from headwise.masks import as_mask
from headwise.models.capture._active_modules import ActiveModules, heads_of
from headwise.models.capture._call import AttentionCall, uncompiled
from headwise.models.capture._matmul import Product, is_product, read_product
from headwise.models.capture._visibility import Masks, visible_keys

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_DROPOUT = (F.dropout, torch.dropout)
# A softmax whose product has not come when so many others have begun is of something else.
_PENDING = 4


@dataclass(frozen=True)
class SoftmaxCall(AttentionCall):
    """A call of which the logits are known, and not the queries and keys they came from.

    `q` and `k` have no width, and the rule's bias is the logits; so every statistic follows
    from them as from any others, but for the largest logit without bias.

    Attributes:
        plain: The logits, where they are known to be plain products, scaled and masked.
    """

    plain: Float[Tensor, "B H T S"] | None = None

    @property
    def statistics_kernel(self) -> str:
        return f"{super().statistics_kernel} of the model's own logits"

    def row_statistics(self, request: RowRequest) -> RowStatistics:
        rows = super().row_statistics(request)
        if self.plain is None:
            return replace(rows, max_logit=torch.full_like(rows.max_logit, torch.nan))
        return replace(rows, max_logit=self.plain.amax(-1))


@dataclass(eq=False)
class _Trace:
    """Weights on their way from a softmax to their product with values."""

    logits: Tensor
    scores: Tensor | None  # products of queries and keys, where they are known
    hidden: Tensor | None  # by a mask; None where that is not known
    module: nn.Module
    weights: dict[int, Tensor] = field(default_factory=dict)
    dropped: bool = False


class SoftmaxTracker:
    """Follows the weights of every softmax over the last axis until they meet their values.
    The modules in which one met no values that could be read are `unread`.
    """

    def __init__(self, running: ActiveModules) -> None:
        self._running = running
        self._finish = uncompiled(self._complete)
        self._traces: list[_Trace] = []
        self._scores: tuple[Tensor, int] | None = None
        self._masks = Masks()

    def follow(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], answer: Any
    ) -> AttentionCall | None:
        """Take in one call of a function of torch; returns the attention that it completes."""
        if func in _SOFTMAX:
            self._begin(answer, *args, **kwargs)
            return None
        trace = self._trace_of(args)
        if trace is None:
            self._note_scores(func, answer)
            if not torch.compiler.is_compiling():
                self._masks.follow(func, args, kwargs, answer)
        elif is_product(func):
            self._traces.remove(trace)
            # Weights times weights, as approximations of attention have them, are no heads.
            both = sum(id(x) in trace.weights for x in _flat(args)) > 1
            product = None if both else read_product(func, args, answer, trace.weights)
            return self._finish(trace, product)
        elif isinstance(answer, Tensor) and answer.shape.numel() == trace.logits.shape.numel():
            trace.weights[id(answer)] = answer
            trace.dropped |= func in _DROPOUT and _drops(*args[1:], **kwargs)
        return None

    def forget(self) -> None:
        """The pass is over: what has not met its values never will."""
        for trace in self._traces:
            self._give_up(trace)
        self._traces, self._scores = [], None
        self._masks.forget()

    def _begin(
        self, weights: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any
    ) -> None:
        if input.ndim < 3 or dim not in (-1, input.ndim - 1) or weights is input:
            return
        scores, self._scores = self._scores, None
        if scores is not None:
            same_size = scores[0].shape.numel() == input.shape.numel()
            unchanged = version_of(scores[0]) == scores[1]
            scores = scores if same_size and unchanged else None
        hidden = self._masks.hidden_of(input)
        module = self._running.innermost(nn.Softmax)
        trace = _Trace(input, scores and scores[0], hidden, module)
        trace.weights[id(weights)] = weights
        self._traces.append(trace)
        if len(self._traces) > _PENDING:
            self._give_up(self._traces.pop(0))

    def _give_up(self, trace: _Trace) -> None:
        axes = self._running.unread.get(id(trace.module), 0)
        self._running.unread[id(trace.module)] = max(axes, trace.logits.ndim)

    def _trace_of(self, args: Any) -> _Trace | None:
        given = _flat(args)
        for trace in self._traces:
            if any(id(x) in trace.weights for x in given):
                return trace
        return None

    def _note_scores(self, func: Callable[..., Any], answer: Any) -> None:
        """The latest product before a softmax is that of queries and keys."""
        if is_product(func):
            known = answer.ndim >= 3 and not answer.is_inference()  # which tell no version
            self._scores = (answer, version_of(answer)) if known else None

    def _complete(self, trace: _Trace, product: Product | None) -> AttentionCall | None:
        shape = None if product is None else _four_axes(trace, product, self._running)
        if product is None or shape is None:
            self._give_up(trace)
            return None
        B, H, T, S = shape
        logits = trace.logits.detach().reshape(shape)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        hidden = None if trace.hidden is None else trace.hidden.reshape(shape)
        visible = visible_keys(logits, hidden, trace.logits.dtype)
        v = _values(product.values.detach(), product.weights.shape, shape)
        return SoftmaxCall(
            module=self._running.innermost(),
            q=logits.new_zeros(B, H, T, 0),
            k=logits.new_zeros(B, v.shape[1], S, 0),
            v=v,
            rule=make_rule(
                head_dim=1, mask=as_mask(visible), bias=logits.masked_fill(~visible, 0.0)
            ),
            heads=product.heads.detach().reshape(B, H, T, -1),
            watched="the function mode, from a softmax to its values",
            kernel="softmax",
            exact=not trace.dropped,
            cross=self._running.reads_another_text(T, S),
            plain=_plain(trace, logits, visible),
        )


def _flat(args: Any) -> list[Any]:
    """Arguments, and those in a list among them."""
    return [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]


def _drops(p: float | int = 0.5, training: bool = True, *_: Any, **kwargs: Any) -> bool:
    return kwargs.get("p", p) > 0 and kwargs.get("training", kwargs.get("train", training))


def _four_axes(trace: _Trace, product: Product, running: ActiveModules) -> tuple[int, ...] | None:
    """Texts, heads, queries and keys; None where it cannot be told which is which."""
    T, S = product.weights.shape[-2:]
    for shape in (product.weights.shape, trace.logits.shape):
        if shape[-2:] == (T, S) and len(shape) >= 4:
            return shape[0], math.prod(shape[1:-2]), T, S
    if trace.logits.shape[-2:] != (T, S):
        return None
    rows = product.weights.shape[0]
    heads = heads_of(running.innermost())
    return (rows // heads, heads, T, S) if rows % heads == 0 else (rows, 1, T, S)


def _values(
    v: Float[Tensor, "*some S Dv"], weights: torch.Size, shape: tuple[int, ...]
) -> Float[Tensor, "B Hkv S Dv"]:
    """Values as they are shared by heads; those that no axis tells apart are one head's."""
    B, H, _, S = shape
    if len(weights) == 5 and v.ndim == 5 and v.shape[2] == 1:  # heads of a group
        v = v[:, :, 0]
    if v.ndim == 4 and len(weights) > 3:
        return v.expand(B, -1, -1, -1)
    return v.expand(*weights[:-2], *v.shape[-2:]).reshape(B, H, S, v.shape[-1])


def _plain(
    trace: _Trace, logits: Float[Tensor, "B H T S"], visible: Bool[Tensor, "B H T S"]
) -> Float[Tensor, "B H T S"] | None:
    """The logits behind the mask, if they are the product of queries and keys times a number."""
    if trace.scores is None:
        return None
    scores = torch.where(visible, trace.scores.detach().reshape(logits.shape).to(logits.dtype), 0.0)
    seen = torch.where(visible, logits, 0.0)
    most = scores.abs().argmax()
    factor = seen.flatten()[most] / scores.flatten()[most]
    fine = torch.finfo(trace.logits.dtype).eps * 16
    if (seen - factor * scores).abs().max() <= fine * seen.abs().max():
        return logits.masked_fill(~visible, -torch.inf)
    return None
