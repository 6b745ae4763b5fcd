"""Capture functions of torch: fused attention, and attention that a module implements by hand."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise._torch_private import (
    FUSED_ATTENTION,
    FUSED_FUNCTION,
    can_observe_operators,
    has_function_modes,
    in_backward,
    in_func_transform,
    observe_operators,
    operator_observers,
    pop_function_mode,
    push_function_mode,
    stop_observing_operators,
)
from headwise.capture._attention_modules import HOOKED, n_heads_of
from headwise.capture._call import AttentionCall, GraphCall
from headwise.capture._capture import Capture
from headwise.capture._running_calls import is_in_graph
from headwise.capture._softmax import SoftmaxTracker
from headwise.capture._unsupported import Unsupported
from headwise.kernels import make_rule
from headwise.masks.parts import top_left


class FunctionCapture(TorchFunctionMode):
    """Captures `scaled_dot_product_attention` and softmax attention, in one thread.

    Both are observed as operators, at no cost for other functions. What a softmax weighs needs the
    function mode too, which receives every call of torch: it is on in the first pass, and stays on
    if that has shown attention by hand.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture, self._softmaxes = capture, SoftmaxTracker(capture)
        self._thread, self._is_on = threading.get_ident(), False

    @property
    def _is_needed(self) -> bool:
        """Whether a pass is to be followed from function to function, or else by operators."""
        # A replacement of torch's function, as by `fast_attention`, may call other kernels.
        return self._capture.by_hand is not False or not can_observe_operators()

    def open(self) -> None:
        if can_observe_operators():
            observe_operators(self.observe)
        self.begin_pass()

    def begin_pass(self) -> None:
        """Put the function mode on, if it is needed."""
        if self._is_needed and not self._is_on and threading.get_ident() == self._thread:
            self._is_on = True
            push_function_mode(self)

    def end_pass(self, is_finished: bool) -> None:
        """A forward pass has ended."""
        # In a backward pass or a transform, modes would not outlive what runs.
        is_passing = in_backward() or in_func_transform()
        if is_passing or not self._is_on or threading.get_ident() != self._thread:
            return
        self._softmaxes.clear()
        if self._capture.by_hand is None and is_finished and self._capture.is_active:
            self._capture.by_hand = False
        if not self._is_needed:
            self._remove_mode()

    @property
    def is_closed(self) -> bool:
        return not self._capture.is_open

    def close(self) -> None:
        stop_observing_operators(self.observe)
        self._remove_mode()

    def _remove_mode(self) -> None:
        """Captures may end in any order, but a mode's own exit would remove the latest mode."""
        self._is_on = False
        later: list[Any] = []
        # An interrupt inside torch may have lost modes that torch removes for a moment.
        while has_function_modes() and (top := pop_function_mode()) is not self:
            later.append(top)
        for mode in reversed(later):
            push_function_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, capture = kwargs or {}, self._capture
        if not self._is_on or not capture.is_active or capture.captured_elsewhere:
            return func(*args, **kwargs)
        if func in (F.scaled_dot_product_attention, FUSED_FUNCTION):
            if can_observe_operators():  # so that it is captured as an operator
                return func(*args, **kwargs)
            return self._attend(func, args, kwargs)
        output = func(*args, **kwargs)
        # An assignment to a tensor returns None, and so do the functions that switch gradients.
        changed = args[0] if output is None and args else output
        if not isinstance(changed, Tensor) or not changed.numel():  # such as a shape, or no text
            return output
        with torch.no_grad():
            call = self._softmaxes.follow(func, args, kwargs, output)
            if call is not None:
                capture.on_call(call)
        return output

    def observe(self, name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Receive a call of an operator that is observed."""
        capture = self._capture
        if capture.captured_elsewhere or not capture.is_active:
            return operator(*args, **kwargs)
        if capture.follows_graphs and is_in_graph():  # which hands over its own calls
            return operator(*args, **kwargs)
        if name == FUSED_ATTENTION:
            return self._attend(operator, args, kwargs)
        output = operator(*args, **kwargs)
        if not self._is_on:
            self._softmaxes.refuse_unfollowed(output, *args, **kwargs)
        return output

    def _attend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call fused attention, or answer in its place, and capture the call."""
        capture, module = self._capture, self._capture.innermost()
        if module is None or isinstance(module, HOOKED):
            return func(*args, **kwargs)
        heads = self._answer(module, *args, **kwargs)
        if heads is not None:
            return heads
        output = capture.compute_uncaptured(
            func, *args, **kwargs
        )  # a replacement may call torch's in turn
        query = args[0] if args else kwargs["query"]
        if not _have_heads(query, module):
            shape = tuple(query.shape)
            why = f"which axes of its queries {shape} are heads is unknown"
            capture.uncaptured.unsupported[id(module)] = Unsupported(why)
            return output
        with torch.no_grad():
            capture.on_call(_call(capture.detach, module, output, *args, **kwargs))
        return output

    def _answer(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | None:
        """The heads computed in place of torch's kernel, if that is possible."""
        capture = self._capture
        given = [*args, *kwargs.values()]
        if query.ndim != 4 or not capture.may_answer(query, key, value, given=given):
            return None
        with torch.no_grad():
            call = _call(capture.detach, module, query[..., :0], query, key, value, *args, **kwargs)
            heads = capture.answer_to(call) if call.exact else None
        return None if heads is None else heads.reshape(*query.shape[:-1], value.shape[-1])


@contextmanager
def capture_functions(capture: Capture) -> Iterator[FunctionCapture]:
    """Capture functions of torch in this thread."""
    _clear_leftovers()
    functions = FunctionCapture(capture)
    try:
        functions.open()
        yield functions
    finally:
        functions.close()


def _clear_leftovers() -> None:
    """Remove closed captures that an interrupt has left in this thread."""
    modes: list[Any] = []
    while has_function_modes():
        modes.append(pop_function_mode())
    for mode in reversed(modes):
        if not (isinstance(mode, FunctionCapture) and mode.is_closed):
            push_function_mode(mode)
    for observer in operator_observers():
        capture = getattr(observer, "__self__", None)
        if isinstance(capture, FunctionCapture) and capture.is_closed:
            stop_observing_operators(observer)


def call_of_function(call: GraphCall) -> AttentionCall:
    """A call of `scaled_dot_product_attention` in a compiled graph."""
    q, k, causal = call.q, call.k, bool(call.is_causal)
    arguments = call.heads, q, k, call.v, call.mask, 0.0, causal, call.scale
    return _call(lambda *x: [*x], call.module, *arguments)


def _call(
    detach: Callable[..., list[Tensor]],
    module: nn.Module,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """A call of `scaled_dot_product_attention`, from its arguments and its output."""
    lead = query.shape[:-2]
    tensors = detach(query, key, value, output)
    q, k, v, heads = (_four_axes(x, lead, module) for x in tensors)
    T, S = q.shape[2], k.shape[2]
    mask = None
    if attn_mask is not None:
        (mask,) = detach(attn_mask)
        mask = mask if mask.ndim <= 2 else _four_axes(mask, lead, module)
    rule = make_rule(head_dim=q.shape[-1], mask=mask, scale=scale, is_added=True)
    if is_causal:  # beside a mask, too
        causal = top_left(T, S, q.device)
        rule = replace(rule, visible=causal if rule.visible is None else rule.visible & causal)
    return AttentionCall(
        module=module,
        q=q, k=k, v=v,
        rule=rule,
        heads=heads,
        watched="the function mode",
        kernel="scaled_dot_product_attention",
        exact=not dropout_p,
        in_graph=call_of_function,
    )  # fmt: skip


def _four_axes(x: Tensor, lead: torch.Size, module: nn.Module) -> Shaped[Tensor, "#B #H _ _"]:
    """The queries, keys, values, heads or mask of a call whose queries have these leading axes."""
    if len(lead) == 2:
        return x if x.ndim == 4 else x[None]  # a mask of all texts
    heads = n_heads_of(module)  # last: it takes long to ask
    if len(lead) == 1:  # texts and heads share the first axis
        heads = heads if lead[0] % heads == 0 else 1
        return x.expand(*lead, *x.shape[-2:]).reshape(-1, heads, *x.shape[-2:])
    if not lead:  # one head of one text
        return x[None, None]
    if x.ndim > 2 and x.shape[-3] not in (1, lead[-1]):  # heads that share keys and values
        x = x.repeat_interleave(lead[-1] // x.shape[-3], -3)
    x = x.expand(*lead, *x.shape[-2:])
    return x.flatten(0, -4) if lead[-1] == heads else x.flatten(1, -3)


def _have_heads(query: Tensor, module: nn.Module) -> bool:
    """Whether the axes of queries say what is a head: in more than four, the module's number does.

    Its heads are the last axis before the tokens, beside windows of a text, or the product of all
    but the first, which are then groups.
    """
    lead = query.shape[:-2]
    return len(lead) < 3 or n_heads_of(module) in (lead[-1], math.prod(lead[1:]))
