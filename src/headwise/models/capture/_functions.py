"""Capture functions of torch: fused attention, and attention that a module implements by hand."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise._torch_private import (
    FUSED_ATTENTION,
    can_observe_operators,
    has_function_modes,
    is_compiler_loaded,
    observe_operators,
    operator_observers,
    pop_function_mode,
    push_function_mode,
    stop_observing_operators,
)
from headwise.kernels import make_rule
from headwise.masks.parts import top_left
from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import AttentionCall, uncompiled
from headwise.models.capture._module_call import heads_of
from headwise.models.capture.softmax import SoftmaxTracker


class FunctionCapture(TorchFunctionMode):
    """Captures `scaled_dot_product_attention` and attention that a module implements by hand.

    Attention by hand needs the function mode, which receives every call of torch in its thread.
    Once a model is known to have none, only the operators of attention are observed.
    """

    def __init__(self, active: ActiveModules, softmaxes: SoftmaxTracker) -> None:
        super().__init__()
        self._active, self._softmaxes = active, softmaxes
        self._is_on = False
        self.thread = threading.get_ident()

    def intercept_all(self) -> None:
        """Put the function mode on, in place of observed operators."""
        if not self._is_on:
            push_function_mode(self)
            self._is_on = True
            stop_observing_operators(self.observe)

    def observe_operators(self) -> bool:
        """Observe operators in place of the function mode; False where that is impossible."""
        if not can_observe_operators():
            return False
        observe_operators(self.observe)
        if self._is_on:
            self._is_on = False
            self._remove_mode()
        return True

    def end_pass(self) -> None:
        """Forget the tensors that were followed."""
        self._softmaxes.clear()

    @property
    def is_closed(self) -> bool:
        return not self._active.is_open

    def close(self) -> None:
        self._is_on = False
        stop_observing_operators(self.observe)
        self._remove_mode()

    def _remove_mode(self) -> None:
        """Captures may end in any order, but a mode's own exit would remove the latest mode."""
        later: list[Any] = []
        # An interrupt inside torch may have lost modes that torch removes for a moment.
        while has_function_modes() and (top := pop_function_mode()) is not self:
            later.append(top)
        for mode in reversed(later):
            push_function_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A compiler that follows the mode may give one function the result of another.
        intercept = self._intercept_uncompiled if is_compiler_loaded() else self._intercept
        return intercept(func, args, kwargs or {})

    @cached_property
    def _intercept_uncompiled(self) -> Callable[..., Any]:
        return uncompiled(self._intercept)

    def _intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        active = self._active
        if not self._is_on or not active.is_open or active.captured_elsewhere or not active.calls:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        output = func(*args, **kwargs)
        if output is not None and not isinstance(output, Tensor):  # such as a shape
            return output
        with torch.no_grad():
            call = self._softmaxes.follow(func, args, kwargs, output)
            if call is not None:
                active.on_call(call)
        return output

    def observe(self, name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of an operator that is observed in place of functions."""
        active = self._active
        if not active.is_open or active.captured_elsewhere or not active.calls:
            return operator(*args, **kwargs)
        if name == FUSED_ATTENTION:
            return self._attend(operator, *args, **kwargs)
        output = operator(*args, **kwargs)
        follows = self._softmaxes.begin_unprepared(output, *args, **kwargs)
        if follows and active.interception is not None:
            active.interception.start_over()
        return output

    def _attend(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call fused attention, or answer in its place, and capture the call."""
        heads = self._answer(*args, **kwargs)
        if heads is not None:
            return heads
        output, active = func(*args, **kwargs), self._active
        query, module = args[0] if args else kwargs["query"], active.innermost()
        if not _have_heads(query, module):
            shape = tuple(query.shape)
            why = f"not supported: which axes of its queries {shape} are heads is unknown"
            active.understanding.unsupported[id(module)] = why
            return output
        with torch.no_grad():
            active.on_call(_call(active, output, *args, **kwargs))
        return output

    def _answer(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """The heads computed in place of torch's kernel, if that is possible."""
        active = self._active
        possible = query.ndim == 4 and active.may_answer(query, key, value)
        if active.answer is None or not possible:
            return None
        with torch.no_grad():
            call = _call(active, query[..., :0], query, key, value, *args, **kwargs)
            heads = active.answer(call) if call.exact else None
        if heads is None:
            return None
        active.attends(call.module)
        return heads.reshape(*query.shape[:-1], value.shape[-1])


@contextmanager
def capture_functions(
    active: ActiveModules, softmaxes: SoftmaxTracker
) -> Iterator[FunctionCapture]:
    """Capture functions of torch in this thread, in the way that the interception decides."""
    _clear_leftovers()
    capture = FunctionCapture(active, softmaxes)
    try:
        yield capture
    finally:
        capture.close()


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


def _call(
    active: ActiveModules,
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
    module, lead = active.innermost(), query.shape[:-2]
    tensors = (active.detach(x) for x in (query, key, value, output))
    q, k, v, heads = (_four_axes(x, lead, module) for x in tensors)
    T, S = q.shape[2], k.shape[2]
    mask = None if attn_mask is None else active.detach(attn_mask)
    if mask is not None and mask.ndim > 2:
        mask = _four_axes(mask, lead, module)
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
    )  # fmt: skip


def _four_axes(x: Tensor, lead: torch.Size, module: nn.Module) -> Shaped[Tensor, "#B #H _ _"]:
    """The queries, keys, values, heads or mask of a call whose queries have these leading axes."""
    heads = heads_of(module)
    if len(lead) == 2:
        return x if x.ndim == 4 else x[None]  # a mask of all texts
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
    return len(lead) < 3 or heads_of(module) in (lead[-1], math.prod(lead[1:]))
