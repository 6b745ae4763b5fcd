"""Attention calls of compiled models: operators in their graphs hand each call over as it runs.

A compiler traces neither hooks that are added later nor what a watch does. So a handle stands at
each module that attends, and at the model: an object whose tensors are inputs of the graph. One
operator begins a pass, and one follows each attention call; both are opaque to the compiler, have
no gradient, and write nothing that the model reads. Handles begin and end with a watch. What makes
the compiler look again is `forward` of a module in its own `__dict__`, which every graph guards.
"""

from collections.abc import Callable
from functools import cache, wraps
from itertools import count
from typing import Any, no_type_check
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise._torch_private import (
    FUSED_ATTENTION,
    FUSED_FUNCTION,
    is_traced_by_compiler,
    needs_gradient,
)
from headwise.capture._call import GraphCall, OfGraph
from headwise.capture._inputs import (
    Text,
    cached_length,
    has_no_tokens,
    positional_parameters,
    two_axes,
)
from headwise.errors import UnsupportedError
from headwise.kernels import AttentionProblem, attend_by_rule
from headwise.models import SharedSetting

# The attributes of a module that hold its handles: of its passes, and of its attention calls.
PASS, CALL = "_headwise_pass", "_headwise_call"
_numbers = count(1)
_handles: "WeakValueDictionary[int, Handle]" = WeakValueDictionary()


@torch.inference_mode(False)
def _input_of_graphs(number: int) -> Tensor:
    """A tensor that any graph may write to, wherever it is made."""
    return torch.tensor(number, device="cpu")


# Written to by the operator that begins a pass and read by the others, which keeps their order.
_ORDER = _input_of_graphs(0)


class Handle:
    """Stands at a module for the graphs that its calls are compiled to; copies of it are empty.

    Attributes:
        module: The module.
        state: Its number, by which the operators find the handle. They write to it, as a compiler
            believes, and so are not left out.
        order: See `_ORDER`.
        receivers: What the watches of the module do with a call or with a pass.
        answers: Whether the operators of its calls compute the heads, too, where they can.
        describe: Makes an attention call of what such an operator is given.
        names: The positional parameters of the module.
    """

    def __init__(
        self, module: nn.Module, answers: bool = False, describe: OfGraph | None = None
    ) -> None:
        self.module, self.order = module, _ORDER
        self.answers, self.describe = answers, describe
        self.receivers: list[Callable[..., Tensor | None]] = []
        self.names = tuple(positional_parameters(module.forward))
        self.state = _input_of_graphs(next(_numbers))
        _handles[int(self.state)] = self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    """What is copied, or saved, of a handle."""


class _Running:
    """The handle of the module whose forward pass a compiler traces, for functions that are not
    told which module calls them, and whether an operator stands beside a call in it."""

    def __init__(self) -> None:
        # Its own from the beginning: a graph guards which attributes an object has.
        self.handle: Handle | None = None
        self.has_attended = False


_running = _Running()


# What a compiler traces bears no types, since it cannot trace checks of them.


@no_type_check
def follow_call(module, implementation, query, key, value, mask, arguments):
    """Put the operator of an attention call through the interface of transformers into a graph.

    Returns:
        The heads, if the operator computes them.
    """
    handle = getattr(module, CALL, None)
    if handle is None:
        return None
    bias, sinks = arguments.get("position_bias"), arguments.get("s_aux")
    may_answer = implementation == "sdpa" and not arguments.get("dropout")
    return _operator_of(
        handle, may_answer, query, key, value, mask, bias, sinks, arguments.get("scaling"),
        arguments.get("softcap"), arguments.get("is_causal"), implementation,
    )  # fmt: skip


@no_type_check
def _operator_of(handle, may_answer, query, key, value, mask, bias, sinks, *numbers):
    """Put the operator of an attention call into a graph; the heads, if it computes them."""
    tensors = [x for x in (query, key, value, mask, bias, sinks) if x is not None]
    rule = [None if x is None else x.detach() for x in (mask, bias, sinks)]
    q, k, state = query.detach(), key.detach(), (handle.order, handle.state)
    if handle.answers and may_answer and not needs_gradient(*tensors):
        return torch.ops.headwise.answer(q, k, value.detach(), *rule, *numbers, *state)
    torch.ops.headwise.observe(q, k, *rule, *numbers, *state)
    return None


@no_type_check
def followed_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """`scaled_dot_product_attention`, with an operator where a compiler traces it."""
    if is_traced_by_compiler():
        handle = _running.handle
        if handle is not None:
            _running.has_attended = True
            heads = _operator_of(
                handle, query.ndim == 4 and not dropout_p, query, key, value, attn_mask, None, None,
                scale, None, is_causal, FUSED_ATTENTION,
            )  # fmt: skip
            if heads is not None:
                return heads
    return FUSED_FUNCTION(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


followed_attention.calls_torch = True
attention_function = SharedSetting(
    lambda: F.scaled_dot_product_attention,
    lambda function: setattr(F, "scaled_dot_product_attention", function),
    followed_attention,
)


@cache
def following_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a class, by which `followed_attention` knows the module that calls it."""

    @no_type_check
    @wraps(forward)
    def follow(module, *args, **kwargs):
        if not is_traced_by_compiler():
            return forward(module, *args, **kwargs)
        handle = getattr(module, CALL, None)
        outer, _running.handle, _running.has_attended = _running.handle, handle, False
        output = forward(module, *args, **kwargs)
        if handle is not None and not _running.has_attended:
            torch.ops.headwise.miss(handle.order, handle.state)
        _running.handle = outer
        return output

    return follow


@cache
def following_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of this library's own layer, with an operator where a compiler traces it."""

    @no_type_check
    @wraps(forward)
    def follow(module, q, k, v, *, mask=None, causal=False, bias=None, **options):
        if is_traced_by_compiler():
            handle = getattr(module, CALL, None)
            if handle is not None and bias is None and (mask is None or isinstance(mask, Tensor)):
                rule = mask, None, None, None, None, causal
                _operator_of(handle, False, q, k, v, *rule, "headwise")
            elif handle is not None:
                torch.ops.headwise.miss(handle.order, handle.state)
        return forward(module, q, k, v, mask=mask, causal=causal, bias=bias, **options)

    return follow


@no_type_check
def follow_pass(module, args, kwargs):
    """Put the operator of a pass that begins into a graph: a hook, which does nothing elsewhere."""
    if not is_traced_by_compiler():
        return
    handle = getattr(module, PASS, None)
    if handle is None:
        return
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "export: a model cannot be exported while its heads are watched. Export it outside the "
            "block."
        )
    arguments = {**dict(zip(handle.names, args, strict=False)), **kwargs}
    if has_no_tokens(arguments):
        arguments = {}
    ids, mask, positions, vectors = (
        two_axes(arguments.get("input_ids")), two_axes(arguments.get("attention_mask")),
        two_axes(arguments.get("position_ids")), arguments.get("inputs_embeds"),
    )  # fmt: skip
    tokens = ids if ids is not None else vectors
    cached = cached_length(arguments)
    is_tensor = isinstance(cached, Tensor)
    torch.ops.headwise.begin_pass(
        ids, mask, positions, cached if is_tensor else None, None if is_tensor else cached,
        None if tokens is None else tokens.shape[1],
        module.training and torch.is_grad_enabled(), handle.state, handle.order,
    )  # fmt: skip


def _begin_pass(
    ids: Tensor | None,
    mask: Tensor | None,
    positions: Tensor | None,
    cached_tensor: Tensor | None,
    cached: int | None,
    tokens: int | None,
    is_training: bool,
    state: Tensor,
    order: Tensor,
) -> None:
    """A forward pass begins in a graph that runs."""
    handle = _handles.get(int(state))
    if handle is None:  # its watch has ended
        return
    # Copies: the graph may use their memory again.
    text = Text(
        ids=None if ids is None else ids.clone(),
        real=None if mask is None else mask.to(torch.bool, copy=True),
        positions=None if positions is None else positions.clone(),
        cached=cached if cached_tensor is None else cached_tensor.clone(),
        tokens=tokens,
    )
    for receive in tuple(handle.receivers):
        receive(text, is_training)


def _observe(q: Tensor, k: Tensor, *given: Any) -> None:
    """A graph that runs has computed an attention call; `given` is as in `_GIVEN`."""
    *rule, implementation, _, state = given
    handle = _handles.get(int(state))
    if handle is not None:
        call = GraphCall(handle.module, implementation, q, k, None, *rule)
        for receive in tuple(handle.receivers):
            receive(call)


def _miss(order: Tensor, state: Tensor) -> None:
    """A module ran in a graph, beside whose attention call no operator could stand."""
    handle = _handles.get(int(state))
    for receive in () if handle is None else tuple(handle.receivers):
        receive(None)


def _answer(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    """A graph that runs has an attention call for which a watch may compute the heads."""
    *rule, implementation, _, state = given
    handle = _handles.get(int(state))
    if handle is None or handle.describe is None:
        raise UnsupportedError(
            "observe: a watch with exact=False has ended in another thread, while its model ran "
            "compiled. End it after the pass."
        )
    call = GraphCall(handle.module, implementation, q, k, v, *rule)
    received = [receive(call) for receive in tuple(handle.receivers)]
    for heads in received:
        if heads is not None:
            return _by_token(heads)
    own = handle.describe(call)  # in a pass that no watch counts
    computed: Any = attend_by_rule(AttentionProblem(own.q, own.k, own.v, own.rule))
    return _by_token(computed)


def _by_token(heads: Tensor) -> Tensor:
    """Heads in the order of memory that torch's kernels write, and models read next."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _traced(*_: Any) -> None:
    """What an operator computes of tensors without values."""


def _traced_heads(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> Tensor:
    return _by_token(q.new_empty(*q.shape[:-1], v.shape[-1]))


# Not `custom_op`, whose calls take 20 µs more.
_library: Any = torch.library  # its functions bear no types
_operators = _library.Library("headwise", "FRAGMENT")
_GIVEN = (
    "Tensor? mask, Tensor? bias, Tensor? sinks, float? scale, float? softcap, bool? is_causal, "
    "str implementation, Tensor order, Tensor(a!) state"
)
for _schema, _function, _of_outlines in (
    (
        "begin_pass(Tensor? ids, Tensor? mask, Tensor? positions, Tensor? cached_tensor, "
        "SymInt? cached, SymInt? tokens, bool is_training, Tensor(a!) state, Tensor(b!) order) "
        "-> ()",
        _begin_pass,
        _traced,
    ),
    (f"observe(Tensor q, Tensor k, {_GIVEN}) -> ()", _observe, _traced),
    ("miss(Tensor order, Tensor(a!) state) -> ()", _miss, _traced),
    (f"answer(Tensor q, Tensor k, Tensor v, {_GIVEN}) -> Tensor", _answer, _traced_heads),
):
    # Graphs of CUDA would replay what they have recorded, and call nothing.
    _operators.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
    _name = _schema.partition("(")[0]
    _operators.impl(_name, _function, "CPU")
    _operators.impl(_name, _function, "CUDA")
    _operators.impl(_name, _of_outlines, "Meta")
