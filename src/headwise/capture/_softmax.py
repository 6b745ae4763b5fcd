"""Capture hand-written attention: a softmax, and the product of its weights with values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import version_of
from headwise.capture._attention_modules import HOOKED, is_attention, n_heads_of
from headwise.capture._call import AttentionCall
from headwise.capture._capture import Capture
from headwise.capture._logits import (
    ADDED_PRODUCTS,
    MaskTracker,
    Product,
    has_matrix,
    is_product,
    product_within,
    read_product,
    visible_keys,
)
from headwise.capture._unsupported import Unsupported
from headwise.errors import UnsupportedError
from headwise.kernels import RowRequest, RowStatistics, make_rule
from headwise.masks import as_mask

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
_DROPOUT = (F.dropout, torch.dropout)
# A softmax without a product after this many later softmaxes is not attention.
_PENDING = 4
_NO_PRODUCT = "no product of its softmax with values was found"


@dataclass(eq=False)
class SoftmaxCall(AttentionCall):
    """A call whose logits are known, but not the queries and keys behind them.

    `q` and `k` have width 0, and the rule's bias holds the logits. So statistics are computed
    as for any other call, except for the largest logit without bias.

    Attributes:
        plain: The logits, if they are known to be scaled and masked products without a bias;
            attached to the autograd graph where the capture keeps it.
    """

    plain: Float[Tensor, "B H T S"] | None = None

    @property
    def knows_logits(self) -> bool:
        return self.plain is not None

    @property
    def statistics_kernel(self) -> str:
        return f"{super().statistics_kernel} of the model's own logits"

    def row_statistics(self, request: RowRequest) -> RowStatistics:
        rows = super().row_statistics(request)
        if self.plain is None:
            return replace(rows, max_logit=torch.full_like(rows.max_logit, torch.nan))
        return replace(rows, max_logit=self.plain.amax(-1))


@dataclass(eq=False)
class _PendingSoftmax:
    """A softmax whose product with values has not been found yet."""

    logits: Tensor
    scores: Tensor | None  # products of queries and keys, if known
    hidden: Tensor | None  # which keys a mask hides; None if unknown
    module: nn.Module
    are_scores: bool  # whether its logits are products of queries and keys
    weights: dict[int, Tensor] = field(default_factory=dict)
    dropped: bool = False


class SoftmaxTracker:
    """Follows the weights of every softmax over the last axis to their product with values.

    A softmax is attention if its logits are products of queries with keys, and its weights have a
    product with values. Neither is a matrix that all texts share, as in a router, a mixture of
    layers or streams, or a table of embeddings. Every other softmax is noted.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._pending: list[_PendingSoftmax] = []
        self._scores: tuple[Tensor, int] | None = None
        self._masks = MaskTracker()

    def follow(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], output: Any
    ) -> AttentionCall | None:
        """Process one call of a torch function; returns the attention call that it completes."""
        if func in _SOFTMAX:
            self._begin(output, *args, **kwargs)
            return None
        pending = self._pending_of(args)
        if pending is None:
            self._note_scores(func, args, kwargs, output)
            self._masks.follow(func, args, kwargs, output)
        elif is_product(func):
            self._pending.remove(pending)
            # Approximations of attention multiply weights with weights, which gives no heads.
            is_square = sum(id(x) in pending.weights for x in _flat(args)) > 1
            if has_matrix(func, args):
                pending.are_scores = False
            unread = is_square or not pending.are_scores
            product = None if unread else read_product(func, args, output, pending.weights)
            return self._complete(pending, product)
        elif isinstance(output, Tensor) and output.shape.numel() == pending.logits.shape.numel():
            pending.weights[id(output)] = output
            pending.dropped |= func in _DROPOUT and _drops(*args[1:], **kwargs)
        return None

    def refuse_unfollowed(
        self, _: Tensor, logits: Tensor, dim: int | None = None, *__: Any, **___: Any
    ) -> None:
        """Refuse attention by hand in a pass that is not followed from function to function.

        What its masks and biases are is unknown. A softmax of three axes in a module that does not
        attend by its name is taken for a gate or a router.
        """
        capture, module = self._capture, self._capture.innermost(nn.Softmax)
        if (
            module is None
            or isinstance(module, HOOKED)
            or id(module) in capture.uncaptured.other_softmax
        ):
            return
        is_attending = logits.ndim > 3 or (logits.ndim == 3 and is_attention(module))
        if not is_attending or dim not in (-1, logits.ndim - 1):
            self._note_other(module)
            return
        raise UnsupportedError(
            f"observe: {type(module).__name__} computes a softmax by hand, which the first forward "
            f"pass of this watch did not, so that its masks are unknown. Open another watch, and "
            f"warm up with a pass that does: what the first pass shows is followed from then on."
        )

    def clear(self) -> None:
        """End the pass: a softmax that has no product with values by now will have none."""
        for pending in self._pending:
            self._give_up(pending)
        self._pending.clear()
        self._scores = None
        self._masks.clear()

    def _begin(
        self, weights: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any
    ) -> None:
        if weights is input:
            return
        module = self._capture.innermost(nn.Softmax)
        if module is None or isinstance(module, HOOKED):  # or its layer has a hook of its own
            return
        if input.ndim < 3 or dim not in (-1, input.ndim - 1):
            self._note_other(module)
            return
        scores, self._scores = self._scores, None
        if scores is not None:
            same_size = scores[0].shape.numel() == input.shape.numel()
            unchanged = version_of(scores[0]) == scores[1]
            scores = scores if same_size and unchanged else None
        hidden = self._masks.hidden_of(input)
        are_scores = self._masks.are_scores(input)
        pending = _PendingSoftmax(input, scores and scores[0], hidden, module, are_scores)
        pending.weights[id(weights)] = weights
        self._pending.append(pending)
        if len(self._pending) > _PENDING:
            self._give_up(self._pending.pop(0))

    def _give_up(self, pending: _PendingSoftmax) -> None:
        """Note a softmax that is not attention, or is attention that cannot be captured."""
        if pending.are_scores or is_attention(pending.module):
            self._capture.by_hand = True
            self._capture.uncaptured.unsupported.setdefault(
                id(pending.module), Unsupported(_NO_PRODUCT)
            )
        else:
            self._note_other(pending.module)

    def _note_other(self, module: nn.Module) -> None:
        """Note a softmax that is not attention."""
        self._capture.uncaptured.other_softmax.add(id(module))

    def _pending_of(self, args: Any) -> _PendingSoftmax | None:
        tensors = _flat(args)
        for pending in self._pending:
            if any(id(x) in pending.weights for x in tensors):
                return pending
        return None

    def _note_scores(self, func: Callable[..., Any], args: Any, kwargs: Any, output: Any) -> None:
        """Keep the latest product before a softmax, which is that of queries and keys."""
        if func in ADDED_PRODUCTS:
            output = product_within(output, *args, **kwargs)
        if func in ADDED_PRODUCTS or is_product(func):
            # Inference tensors have no version.
            has_version = output.ndim >= 3 and not output.is_inference()
            self._scores = (output, version_of(output)) if has_version else None

    def _complete(self, pending: _PendingSoftmax, product: Product | None) -> AttentionCall | None:
        if not pending.are_scores:
            self._note_other(pending.module)
            return None
        shape = None if product is None else _four_axes(pending, product, self._capture)
        if product is None or shape is None:
            self._give_up(pending)
            return None
        self._capture.by_hand = True
        B, H, T, S = shape
        logits = pending.logits.detach().reshape(shape)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        hidden = None if pending.hidden is None else pending.hidden.reshape(shape)
        visible = visible_keys(logits, hidden, pending.logits.dtype)
        values, heads = self._capture.detach(product.values, product.heads)
        v = _values(values, product.weights.shape, shape)
        return SoftmaxCall(
            module=self._capture.innermost() or pending.module,
            q=logits.new_zeros(B, H, T, 0),
            k=logits.new_zeros(B, v.shape[1], S, 0),
            v=v,
            rule=make_rule(
                head_dim=1, mask=as_mask(visible), bias=logits.masked_fill(~visible, 0.0)
            ),
            heads=heads.reshape(B, H, T, -1),
            watched="the function mode, from a softmax to its values",
            kernel="softmax",
            exact=not pending.dropped,
            plain=self._plain(pending, visible),
        )

    def _plain(
        self, pending: _PendingSoftmax, visible: Bool[Tensor, "B H T S"]
    ) -> Float[Tensor, "B H T S"] | None:
        """The masked logits, if they are products of queries and keys times one factor."""
        if pending.scores is None:
            return None
        with torch.set_grad_enabled(self._capture.keeps_graph):
            (logits,) = self._capture.detach(pending.logits)
            work = torch.promote_types(logits.dtype, torch.float32)
            logits, scores = (
                x.reshape(visible.shape).to(work) for x in (logits, pending.scores.detach())
            )
            shown, scores = (torch.where(visible, x, 0.0) for x in (logits, scores))
            largest = scores.abs().argmax()
            factor = shown.flatten()[largest] / scores.flatten()[largest]
            gap = (shown - factor * scores).abs().max()
            if gap <= torch.finfo(pending.logits.dtype).eps * 16 * shown.abs().max():
                return logits.masked_fill(~visible, -torch.inf)
        return None


def _flat(args: Any) -> list[Any]:
    """All arguments, including those inside lists."""
    return [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]


def _drops(p: float | int = 0.5, training: bool = True, *_: Any, **kwargs: Any) -> bool:
    return kwargs.get("p", p) > 0 and kwargs.get("training", kwargs.get("train", training))


def _four_axes(
    pending: _PendingSoftmax, product: Product, capture: Capture
) -> tuple[int, ...] | None:
    """The numbers of texts, heads, queries and keys; None if the axes are ambiguous."""
    T, S = product.weights.shape[-2:]
    for shape in (product.weights.shape, pending.logits.shape):
        if shape[-2:] == (T, S) and len(shape) >= 4:
            return shape[0], math.prod(shape[1:-2]), T, S
    if pending.logits.shape[-2:] != (T, S):
        return None
    rows = product.weights.shape[0]
    heads = n_heads_of(capture.innermost() or pending.module)
    return (rows // heads, heads, T, S) if rows % heads == 0 else (rows, 1, T, S)


def _values(
    v: Float[Tensor, "*lead S Dv"], weights: torch.Size, shape: tuple[int, ...]
) -> Float[Tensor, "B Hkv S Dv"]:
    """Values by kv head; values without an axis for heads belong to one head."""
    B, H, _, S = shape
    if len(weights) == 5 and v.ndim == 5 and v.shape[2] == 1:  # the heads of a group share values
        v = v[:, :, 0]
    if v.ndim == 4 and len(weights) > 3:
        return v.expand(B, -1, -1, -1)
    return v.expand(*weights[:-2], *v.shape[-2:]).reshape(B, H, S, v.shape[-1])
