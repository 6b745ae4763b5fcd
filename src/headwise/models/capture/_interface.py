"""Capture Hugging Face models through their attention interface.

The function that `AttentionInterface.get_interface` returns is wrapped. So any implementation
still computes the model's own output, with its own masks, softcap and sinks. Registering an
implementation of our own would change masks and settings of the model instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise._torch_private import without_operator_observers
from headwise.kernels import AttentionProblem, AttentionRule
from headwise.masks import Mask
from headwise.models._interface import CAPTURES, wrapped_interface
from headwise.models.attention import NAME
from headwise.models.attention.huggingface import Call
from headwise.models.cache import CallKeys, GroupedKeys
from headwise.models.capture._capture import AttentionCall, Capture

# A list, and no attribute of the modules: copies and pickles of a model are not captured.
_open: list[Capture] = []


@contextmanager
def capture_interface(capture: Capture) -> Iterator[None]:
    """Capture every call that a module of a model makes through the interface.

    Functions that the implementation calls in turn are not captured a second time.
    """
    with wrapped_interface(_attend, CAPTURES):
        try:
            _open.append(capture)
            yield
        finally:
            # An interrupt may have left others, which are closed.
            _open[:] = [other for other in _open if other is not capture and other.is_open]


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
    captures = [x for x in _open if x.is_open and id(module) in x.modules]
    inputs = (query, key, value)
    if not captures:
        return inner(module, *inputs, attention_mask, *args, **kwargs)
    if all(capture.is_paused for capture in captures):
        # To be observed costs an operator more than all else that a paused pass does.
        with without_operator_observers(most=len(captures)):
            return inner(module, *inputs, attention_mask, *args, **kwargs)
    captures = [capture for capture in captures if not capture.is_paused]
    ours, answered_by, heads = None, None, None
    is_cached = isinstance(key, GroupedKeys)
    if implementation == NAME and not is_cached:
        ours = Call.of(module, NAME, *inputs, attention_mask, kwargs).native_problem()
    describe = partial(_call, implementation, module, inputs, attention_mask, kwargs, ours)
    if not is_cached:
        answered_by, heads = _answer(captures, implementation, kwargs, inputs, describe, ours)
    if heads is not None:
        output = heads.transpose(1, 2), None  # B H T Dv -> B T H Dv
    else:
        compute = partial(inner, module, *inputs, attention_mask, *args, **kwargs)
        output = _uncaptured(captures, compute)
    if torch.is_grad_enabled():
        with torch.no_grad():
            _notify(captures, answered_by, describe, output[0])
    else:
        _notify(captures, answered_by, describe, output[0])
    return output


def _notify(
    captures: list[Capture],
    answered_by: Capture | None,
    describe: Callable[[Capture, Tensor], AttentionCall],
    output: Tensor,
) -> None:
    """Tell a call to all captures but the one that has answered it."""
    heads = output.transpose(1, 2)
    for capture in captures:
        if capture is not answered_by:
            capture.on_call(describe(capture, heads))


def _uncaptured(captures: list[Capture], compute: Callable[[], Any]) -> Any:
    """Let an implementation compute; the captures do not capture what it calls in turn."""
    for capture in captures:
        capture.captured_elsewhere += 1
    try:
        if torch.compiler.is_compiling():
            return compute()
        with without_operator_observers(most=len(captures)):
            return compute()
    finally:
        for capture in captures:
            capture.captured_elsewhere -= 1


def _answer(
    captures: list[Capture],
    implementation: str,
    kwargs: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    describe: Callable[[Capture, Tensor], AttentionCall],
    ours: AttentionProblem | None,
) -> tuple[Capture | None, Tensor | None]:
    """The first capture that answers in place of the implementation, and its heads."""
    for capture in captures:
        if not capture.may_answer(*inputs, ours=ours is not None):
            continue
        # The eager implementation also returns weights, which an answer does not have.
        if kwargs.get("dropout") or implementation in (None, "eager"):
            break
        heads = capture.answer_to(describe(capture, inputs[0].detach()[..., :0]))
        if heads is not None:
            return capture, heads
    return None, None


def _call(
    implementation: str,
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    kwargs: dict[str, Any],
    ours: AttentionProblem | None,
    capture: Capture,
    heads: Tensor,
) -> AttentionCall:
    if ours is None:
        inputs, rule = _inputs_and_rule(module, implementation, inputs, mask, kwargs)
    else:
        inputs, rule = ours[:3], ours.rule
    q, k, v, heads = capture.detach(*inputs, heads)
    return AttentionCall(
        module=module,
        q=q, k=k, v=v,
        rule=rule,
        heads=heads,
        watched="the attention interface",
        kernel=implementation or "eager",
        exact=not kwargs.get("dropout"),
        ours=ours is not None,
    )  # fmt: skip


def _inputs_and_rule(
    module: nn.Module,
    implementation: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    kwargs: dict[str, Any],
) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionRule]:
    """What an implementation reads of its inputs, and the rule that it computes."""
    call = Call.of(module, implementation, *inputs, mask, kwargs)
    if isinstance(call.k, GroupedKeys):
        return _all_columns(call.q, call.k.call, call.rule())
    return call.inputs(), call.rule()


def _all_columns(
    q: Tensor, cached: CallKeys, rule: AttentionRule
) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionRule]:
    """The inputs over all columns of a text, and a rule that hides what each head has dropped."""
    visible: Mask = cached.mask(q.shape[1])
    if rule.visible is not None:
        visible = rule.visible & visible
    return (q, *cached.dense), replace(rule, visible=visible)
