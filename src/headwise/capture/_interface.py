"""Capture Hugging Face models through their attention interface.

The function that `AttentionInterface.get_interface` returns is wrapped. So any implementation
still computes the model's own output, with its own masks, softcap and sinks. Registering an
implementation of our own would change masks and settings of the model instead.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, no_type_check

import torch
from torch import Tensor, nn

from headwise._torch_private import (
    is_traced_by_compiler,
    version_of,
    without_operator_observers,
)
from headwise.attention import NAME
from headwise.attention.huggingface import Call
from headwise.cache import GroupedKeys
from headwise.capture._call import AttentionCall, GraphCall
from headwise.capture._capture import Capture
from headwise.capture._graph import follow_call
from headwise.kernels import AttentionProblem, AttentionRule
from headwise.masks import Mask
from headwise.models.interface import CAPTURES, wrapped_interface

# The most kinds of calls whose rules are kept.
_MOST_SHARED = 64
# A list, and no attribute of the modules: copies and pickles of a model are not captured.
_open: list[Capture] = []


def followed_interface() -> AbstractContextManager[None]:
    """What lets compilers see each call that is made through the interface."""
    return wrapped_interface(_attend_or_follow, CAPTURES)


@contextmanager
def capture_interface(capture: Capture) -> Iterator[None]:
    """Capture every call that a module of a model makes through the interface.

    Functions that the implementation calls in turn are not captured a second time.
    """
    with followed_interface():
        try:
            _open.append(capture)
            yield
        finally:
            # An interrupt may have left others, which are closed.
            _open[:] = [other for other in _open if other is not capture and other.is_open]


@no_type_check  # which a compiler cannot trace
def _attend_or_follow(
    inner, implementation, module, query, key, value, attention_mask, *args, **kwargs
):
    """Call an implementation; a compiler that traces this puts an operator into its graph."""
    if is_traced_by_compiler():
        heads = follow_call(module, implementation, query, key, value, attention_mask, kwargs)
        if heads is not None:
            return heads.transpose(1, 2), None
        return inner(module, query, key, value, attention_mask, *args, **kwargs)
    return _attend(
        inner, implementation, module, query, key, value, attention_mask, *args, **kwargs
    )


def _attend(
    inner: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,  # a tensor of two or four axes, or a BlockMask
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call an implementation, or let a capture answer in its place, and capture the call."""
    captures = [x for x in _open if id(module) in x.modules and x.is_open]
    compute = partial(inner, module, query, key, value, attention_mask, *args, **kwargs)
    active = [capture for capture in captures if not capture.is_paused]
    if not captures:
        return compute()
    if not active:
        # To be observed costs an operator more than all else that a paused pass does.
        with without_operator_observers(most=len(captures)):
            return compute()
    call, ours = Call.of(module, implementation, query, key, value, attention_mask, kwargs), None
    is_cached = isinstance(key, GroupedKeys)
    if implementation == NAME and not is_cached:
        ours = call.native_problem()
    answered_by, heads = (None, None) if is_cached else _answer(active, call, ours)
    # B H T Dv -> B T H Dv
    output = _uncaptured(active, compute) if heads is None else (heads.transpose(1, 2), None)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        for capture in active:
            if capture is not answered_by:
                alike = None if ours is not None or is_cached else _alike(call, capture.shared)
                if alike is None or not capture.repeats(alike, module, query, key):
                    heads = output[0].transpose(1, 2)
                    capture.on_call(_describe(call, ours, capture, heads, alike))
    return output


def _uncaptured(captures: list[Capture], compute: Callable[[], Any]) -> Any:
    """Let an implementation compute; the captures do not capture what it calls in turn."""
    for capture in captures:
        capture.captured_elsewhere += 1
    try:
        with without_operator_observers(most=len(captures)):
            return compute()
    finally:
        for capture in captures:
            capture.captured_elsewhere -= 1


def _answer(
    captures: list[Capture], call: Call, ours: AttentionProblem | None
) -> tuple[Capture | None, Tensor | None]:
    """The first capture that answers in place of the implementation, and its heads."""
    for capture in captures:
        given = call.mask, *call.arguments.values()
        if not capture.may_answer(call.q, call.k, call.v, given=given, ours=ours is not None):
            continue
        # The eager implementation also returns weights, which an answer does not have.
        if call.arguments.get("dropout") or call.implementation in (None, "eager"):
            break
        heads = capture.answer_to(_describe(call, ours, capture, call.q.detach()[..., :0]))
        if heads is not None:
            return capture, heads
    return None, None


@dataclass(frozen=True, eq=False)  # known by identity, which the mask keeps while it is alive
class _Alike:
    """What calls of a pass have in common that differ in module and numbers alone."""

    rule: AttentionRule
    mask: Any


def _describe(
    call: Call,
    ours: AttentionProblem | None,
    capture: Capture,
    heads: Tensor,
    alike: _Alike | None = None,
) -> AttentionCall:
    """A call as watches read it: what the implementation reads, and the rule that it computes."""
    if ours is not None:
        return _as_watched(call, capture.detach(*ours[:3], heads), ours.rule, is_ours=True)
    rule = call.rule() if alike is None else alike.rule
    if isinstance(call.k, GroupedKeys):  # over all columns, of which each head has dropped some
        cached = call.k.call
        visible: Mask = cached.mask(call.q.shape[1])
        visible = visible if rule.visible is None else rule.visible & visible
        tensors = capture.detach(call.q, *cached.dense, heads)
        return _as_watched(call, tensors, replace(rule, visible=visible))
    tensors = capture.detach(*call.inputs(), heads)
    return _as_watched(call, tensors, rule, fits_graph=call.fits_operator, alike=alike)


def _alike(call: Call, shared: dict[Hashable, Any]) -> _Alike | None:
    """What a call shares with others of its pass, so that their rule is found once: to read a mask
    takes 20 to 50 us. None if nothing may be shared."""
    own, mask = call.rule_key, call.mask
    is_tensor = isinstance(mask, Tensor)
    if own is None or (is_tensor and mask.is_inference()):  # whose changes leave no trace
        return None
    key = *own, id(mask), version_of(mask) if is_tensor else 0
    if len(shared) > _MOST_SHARED:  # parts of a model that are called by themselves end no pass
        shared.clear()
    if key not in shared:
        shared[key] = _Alike(call.rule(), mask)
    alike: _Alike = shared[key]
    return alike


def _as_watched(
    call: Call,
    tensors: Sequence[Tensor],
    rule: AttentionRule,
    *,
    is_ours: bool = False,
    fits_graph: bool = False,
    alike: Hashable = None,
) -> AttentionCall:
    q, k, v, heads = tensors
    return AttentionCall(
        module=call.module,
        q=q, k=k, v=v,
        rule=rule,
        heads=heads,
        watched="the attention interface",
        kernel=call.implementation or "eager",
        exact=not call.arguments.get("dropout"),
        ours=is_ours,
        in_graph=_call_in_graph if fits_graph else None,
        alike=alike,
    )  # fmt: skip


def _call_in_graph(of: GraphCall) -> AttentionCall:
    arguments = {
        "position_bias": of.bias, "s_aux": of.sinks, "scaling": of.scale, "softcap": of.softcap,
        "is_causal": of.is_causal,
    }  # fmt: skip
    call = Call.of(of.module, of.implementation, of.q, of.k, of.v, of.mask, arguments)
    return _as_watched(call, [*call.inputs(), of.heads], call.rule(), fits_graph=True)
