"""What intercepts functions of torch, and contexts without it: function modes, tensor subclasses,
and observers of single operators, at no cost for the others.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F

from headwise._torch_private._names import required
from headwise.errors import UnsupportedError

# The operators whose calls can be observed, by their names.
SOFTMAX, FUSED_ATTENTION = "softmax", "scaled_dot_product_attention"
# Torch's own, which others may replace.
FUSED_FUNCTION: Any = F.scaled_dot_product_attention
# Called with the name of an operator, what computes it, and its arguments; returns its result.
OperatorObserver = Callable[..., Any]
# A dispatch key above all that compute or differentiate, which torch itself leaves free.
_OBSERVED_KEY = "TESTING_ONLY_GenericMode"


def without_function_modes() -> AbstractContextManager[None]:
    """A context in which functions of torch reach no function mode and no tensor subclass."""
    context: AbstractContextManager[None] = required(torch._C, "DisableTorchFunction")()
    return context


def without_tensor_subclasses() -> AbstractContextManager[None]:
    """A context in which functions of torch reach no tensor subclass; function modes stay."""
    context: AbstractContextManager[None] = required(torch._C, "DisableTorchFunctionSubclass")()
    return context


def has_function_modes() -> bool:
    """Whether any function mode is active in this thread."""
    return int(required(torch._C, "_len_torch_function_stack")()) > 0


def push_function_mode(mode: Any) -> None:
    """Make a function mode the innermost one."""
    required(torch.overrides, "_push_mode")(mode)


def pop_function_mode() -> Any:
    """Remove the innermost function mode and return it."""
    return required(torch.overrides, "_pop_mode")()


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to everything in nested tuples, lists and dictionaries."""
    from torch.utils._pytree import tree_map

    return tree_map(function, tree)


class _Observers(threading.local):
    """The observers of this thread, the innermost last, and the guard that is open with them.

    `excluding` is the guard around calls that nobody observes, made once: that takes the longest.
    """

    def __init__(self) -> None:
        self.all: list[OperatorObserver] = []
        self.guard: Any = None
        self.excluding: Any = None


_observers = _Observers()


def can_observe_operators() -> bool:
    """Whether calls of single operators can be observed at no cost for the others."""
    # A replacement of torch's function, as by `fast_attention`, may call other kernels.
    function: Any = F.scaled_dot_product_attention
    is_torchs = isinstance(function, BuiltinFunctionType) or hasattr(function, "calls_torch")
    return is_torchs and _are_observable()


@cache
def _are_observable() -> bool:
    try:
        _make_observable()
    # Another version of torch, or another user of the key.
    except (AttributeError, RuntimeError, UnsupportedError):
        return False
    return True


@cache
def _make_observable() -> tuple[Any, ...]:
    """Kernels of the observed operators under a key that is on only while there are observers."""
    for name in ("_ExcludeDispatchKeyGuard", "_IncludeDispatchKeyGuard"):
        required(torch._C, name)
    _observed_keys()
    library: Any = torch.library  # its functions bear no types
    fallback = library.Library("_", "IMPL")
    fallback.fallback(library.fallthrough_kernel, _OBSERVED_KEY)
    kernels = library.Library("aten", "IMPL", _OBSERVED_KEY)
    kernels.impl("softmax.int", partial(_observed, SOFTMAX, torch.ops.aten.softmax.int))
    fused = torch.ops.aten.scaled_dot_product_attention.default
    kernels.impl(FUSED_ATTENTION, partial(_observed, FUSED_ATTENTION, fused))
    return fallback, kernels  # which unregister when they are collected


@cache
def _observed_key() -> Any:
    required(torch._C, "_dispatch_tls_is_dispatch_key_included")
    return torch._C._dispatch_key_parse(_OBSERVED_KEY)


@cache
def _observed_keys() -> Any:
    return torch._C.DispatchKeySet(_observed_key())


def _observed(name: str, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator through the observers of this thread, which do not observe each other."""
    with torch._C._ExcludeDispatchKeyGuard(_observed_keys()):
        # A compiler traces with tensors of its own, and what it traces runs later.
        if type(args[0]).__module__.startswith("torch._subclasses"):
            return operator(*args, **kwargs)
        call = operator
        for observer in _observers.all:
            call = partial(observer, name, call)
        return call(*args, **kwargs)


def observe_operators(observer: OperatorObserver) -> None:
    """Let an observer receive the observed operators' calls in this thread."""
    if observer not in _observers.all:
        _observers.all.append(observer)
    if _observers.excluding is None:
        _observers.excluding = torch._C._ExcludeDispatchKeyGuard(_observed_keys())
    _skip_higher_order_operators()
    if not torch._C._dispatch_tls_is_dispatch_key_included(_observed_key()):
        _observers.guard = torch._C._IncludeDispatchKeyGuard(_observed_key())
        _observers.guard.__enter__()


def _skip_higher_order_operators() -> None:
    """Let operators that take functions, as those of `flex_attention`, pass over the key.

    They have kernels for known keys only, and no fallback. Some are made late, when they are used.
    """
    operators: Any = torch._ops
    for operator in getattr(operators, "_higher_order_ops", {}).values():
        if operator.non_fallthrough_keys.has(_observed_key()):
            operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(_observed_key())


def operator_observers() -> list[OperatorObserver]:
    """The observers of this thread."""
    return list(_observers.all)


def stop_observing_operators(observer: OperatorObserver) -> None:
    """Undo `observe_operators`; nothing if the observer is not there."""
    if observer in _observers.all:
        _observers.all.remove(observer)
    if not _observers.all and _observers.guard is not None:
        guard, _observers.guard = _observers.guard, None
        guard.__exit__(None, None, None)


def without_operator_observers(most: int) -> AbstractContextManager[None]:
    """A context in which no operator is observed, if there are no more observers than `most`."""
    if not 0 < len(_observers.all) <= most:
        return nullcontext()
    context: AbstractContextManager[None] = _observers.excluding
    return context
