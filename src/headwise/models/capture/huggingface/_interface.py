"""Listen to Hugging Face models through their attention interface.

What `AttentionInterface.get_interface` returns is wrapped, so that whatever implementation a
model uses still computes the answer, with its own masks, softcap and sinks. Registering an
implementation of our own would change masks and settings of the model instead.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from headwise._interrupts import reversible
from headwise.models.capture._active_modules import ActiveModules
from headwise.models.capture._call import AttentionCall, Hear
from headwise.models.capture.huggingface._rule import keys_read, rule_of

Listener = tuple[Hear, ActiveModules]


class _Listeners(tuple[Listener, ...]):
    """They listen to one model: a copy of it, and what is pickled of it, has none."""

    def __reduce__(self) -> tuple[type["_Listeners"], tuple[()]]:
        return _Listeners, ()


# On each module that is listened to, those who listen. A plain attribute: torch.compile
# follows it, a look-up elsewhere by identity it would not.
_LISTENERS = "_headwise_listeners"
_lock = threading.Lock()
_open = 0
_original: Any = None


@reversible
def capture_interface(model: nn.Module, hear: Hear, running: ActiveModules) -> Iterator[None]:
    """Tell `hear` of every call that a module of `model` makes through the interface.

    What the implementation calls in turn is told to `running` as heard.
    """
    listener = (hear, running)
    modules = list(model.modules())
    _install()
    try:
        for module in modules:
            listeners = module.__dict__.get(_LISTENERS, ())
            module.__dict__[_LISTENERS] = _Listeners((*listeners, listener))
        yield
    finally:
        for module in modules:
            _forget(module, listener)
        _uninstall()


def _forget(module: nn.Module, listener: Listener) -> None:
    left = _Listeners(one for one in module.__dict__.get(_LISTENERS, ()) if one is not listener)
    if left:
        module.__dict__[_LISTENERS] = left
    else:
        module.__dict__.pop(_LISTENERS, None)


def _install() -> None:
    global _open, _original
    with _lock:
        _open += 1
        if _open > 1:
            return
        _original = AttentionInterface.get_interface

        def get_interface(
            interface: AttentionInterface, implementation: str, default: Callable[..., Any]
        ) -> Callable[..., Any]:
            inner = _original(interface, implementation, default)
            return partial(_run, inner, implementation)

        AttentionInterface.get_interface = get_interface


def _uninstall() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            AttentionInterface.get_interface = _original


def _run(
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
    listeners: tuple[Listener, ...] = module.__dict__.get(_LISTENERS, ())
    if not listeners:
        return inner(module, query, key, value, attention_mask, *args, **kwargs)
    describe = partial(
        _call, listeners, implementation, module, query, key, value, attention_mask, kwargs
    )
    by, heads = _answered(listeners, implementation, kwargs, (query, key, value), describe)
    if heads is not None:
        answer = heads.transpose(1, 2), None  # B H T Dv -> B T H Dv
    else:
        with _heard(listeners):
            answer = inner(module, query, key, value, attention_mask, *args, **kwargs)
    untold = [hear for hear, running in listeners if running is not by]
    if untold:
        with torch.no_grad():
            call = describe(answer[0].detach().transpose(1, 2))
            for hear in untold:
                hear(call)
    return answer


@contextmanager
def _heard(listeners: tuple[Listener, ...]) -> Iterator[None]:
    """What happens here is heard already."""
    for _, running in listeners:
        running.heard_elsewhere += 1
    try:
        yield
    finally:
        for _, running in listeners:
            running.heard_elsewhere -= 1


def _answered(
    listeners: tuple[Listener, ...],
    implementation: str,
    kwargs: dict[str, Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    describe: Callable[[Tensor], AttentionCall],
) -> tuple[ActiveModules | None, Tensor | None]:
    """The first listener that answers instead of the implementation, and its answer."""
    # The written-out implementation also gives weights, which we do not make.
    if kwargs.get("dropout") or implementation in (None, "eager"):
        return None, None
    for _, running in listeners:
        if running.answer is not None and running.may_answer(*inputs):
            heads = running.answer(describe(inputs[0].detach()[..., :0]))
            if heads is not None:
                return running, heads
    return None, None


def _call(
    listeners: tuple[Listener, ...],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
    heads: Tensor,
) -> AttentionCall:
    q, k, v = query.detach(), key.detach(), value.detach()
    read = keys_read(k.shape[2], mask, implementation)
    if read < k.shape[2]:
        k, v = k[:, :, :read], v[:, :, :read]
    return AttentionCall(
        module=module,
        q=q, k=k, v=v,
        rule=rule_of(module, implementation, q, k, mask, kwargs),
        heads=heads,
        watched="the attention interface",
        kernel=implementation or "eager",
        exact=not kwargs.get("dropout"),
        cross=listeners[-1][1].reads_another_text(q.shape[2], k.shape[2]),
    )  # fmt: skip
