"""Follow the graphs of a compiled model while a block runs: handles stand at its modules."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from operator import is_
from types import MethodType
from typing import Any

from torch import Tensor, nn

from headwise._torch_private import (
    FUSED_FUNCTION,
    can_observe_operators,
    is_of_graph,
    remove_hooks,
    side_effects_under_checkpoint,
)
from headwise.capture._call import AttentionCall, GraphCall, OfGraph
from headwise.capture._functions import call_of_function
from headwise.capture._graph import (
    CALL,
    PASS,
    Handle,
    attention_function,
    follow_pass,
    following_forward,
    following_layer,
)
from headwise.capture._inputs import Text

OnPass = Callable[[Text, bool], None]
# Returns the heads, where the graph leaves them to the operator and the pass counts. None stands
# for a call that was missed.
OnGraphCall = Callable[[GraphCall | None], Tensor | None]


def call_of_layer(call: GraphCall) -> AttentionCall:
    """A call of this library's own layer in a compiled graph."""
    layer: Any = call.module
    rule = layer.rule(call.q, mask=call.mask, causal=call.is_causal)
    return AttentionCall(
        layer, call.q, call.k, call.v, rule, call.heads,
        watched="a hook on the module", kernel="headwise", exact=True, in_graph=call_of_layer,
    )  # fmt: skip


# Which `forward` of a module puts operators into graphs: its own calls what does so.
_FORWARDS: dict[Any, Callable[..., Any]] = {
    call_of_function: following_forward,
    call_of_layer: following_layer,
}


def may_stand_at(module: nn.Module) -> bool:
    """Whether nobody else has replaced `forward` of a module."""
    return "forward" not in vars(module) or _is_of_handle(module)


def may_follow(call: AttentionCall) -> bool:
    """Whether a graph can hand over calls of this kind, and a handle may stand at their module.

    It cannot where others have replaced `forward` of the module or torch's function, or the module
    knows that function by a name of its own.
    """
    if not (call.in_graph and may_stand_at(call.module)):
        return False
    if call.in_graph is not call_of_function:
        return True
    forward = unwrap(type(call.module).forward)
    if not can_observe_operators() or is_of_graph(getattr(forward, "__code__", None)):
        return False
    return all(x is not FUSED_FUNCTION for x in getattr(forward, "__globals__", {}).values())


@contextmanager
def follow_graphs(
    model: nn.Module,
    on_pass: OnPass,
    calls: Iterable[tuple[nn.Module, OfGraph, OnGraphCall]],
    *,
    answers: bool = False,
) -> Iterator[None]:
    """Hand over the passes and attention calls of a model that is compiled, while a block runs.

    Args:
        calls: Each module that attends, its `AttentionCall.in_graph`, and what receives what the
            operator of a call is given.
        answers: Whether operators compute the heads, too, where they can.
    """
    with ExitStack() as stack:
        for module, describe, receive in calls:
            stack.enter_context(_handled(module, CALL, receive, describe, answers))
            if describe is call_of_function:
                stack.enter_context(attention_function.changed())
                stack.enter_context(side_effects_under_checkpoint())
            elif describe not in _FORWARDS:
                from headwise.capture._interface import followed_interface  # imports transformers

                stack.enter_context(followed_interface())
        stack.enter_context(_handled(model, PASS, on_pass))
        yield


@contextmanager
def _handled(
    module: nn.Module,
    name: str,
    receive: Callable[..., Tensor | None],
    describe: OfGraph | None = None,
    answers: bool = False,
) -> Iterator[None]:
    """A handle that stands at a module while a block runs.

    Whether its operators compute heads is decided by the first of several watches.
    """
    attributes = vars(module)
    is_new = attributes.get(name) is None
    handle: Handle = Handle(module, answers, describe) if is_new else attributes[name]
    try:
        if is_new:
            attributes[name] = handle
            _take_down(module, name)  # what a module has that was copied in such a block
            if name == CALL:
                forward = type(module).forward
                followed = _FORWARDS[describe](forward) if describe in _FORWARDS else forward
                attributes["forward"] = MethodType(followed, module)
            else:  # one for all watches: a graph with two would begin each pass twice
                module.register_forward_pre_hook(follow_pass, with_kwargs=True)
        handle.receivers.append(receive)
        yield
    finally:
        if receive in handle.receivers:
            handle.receivers.remove(receive)
        if not handle.receivers:
            attributes.pop(name, None)
            _take_down(module, name)


def _take_down(module: nn.Module, name: str) -> None:
    """Remove what stands at a module beside its handle."""
    if name == CALL:
        if _is_of_handle(module):
            del vars(module)["forward"]
    else:
        remove_hooks(module, partial(is_, follow_pass))


def _is_of_handle(module: nn.Module) -> bool:
    """Whether `forward` in the attributes of a module is what stands beside a handle, or a copy."""
    forward = type(module).forward
    replaced = getattr(vars(module).get("forward"), "__func__", None)
    return replaced in (forward, *(followed(forward) for followed in _FORWARDS.values()))
