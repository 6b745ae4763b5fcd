"""What intercepts the calls of a model: every module and function, or only where it attends."""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from headwise._torch_private import in_backward, in_func_transform, is_observing
from headwise.models._hooks import Hooks


@dataclass
class Understanding:
    """What the forward passes that were followed as a whole have shown about a model.

    Attributes:
        called: Every module that was called so far, by identity.
        needed: The modules whose calls matter: those that attend or contain several calls of
            attention, and those that are called first in a pass.
        unhooked: By module that attends, whether it needs no hook: its calls name it, and it
            attends once in a pass, with a query for each token of its stack.
        calls: The ways in which the model was called, each understood by one whole pass.
        unsupported: Why attention of a module is not captured, by the module's identity.
        other_softmax: The modules with a softmax that is not attention, by identity.
        needs_all: Whether every call must be followed: a softmax outside of fused attention is
            followed from function to function; compiled code is intercepted as a whole; and the
            modules around and inside one tell apart where its keys come from, if some of its
            calls attend to the same text and others to another.
    """

    called: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    unhooked: dict[int, bool] = field(default_factory=dict)
    calls: set[Hashable] = field(default_factory=set)
    unsupported: dict[int, str] = field(default_factory=dict)
    other_softmax: set[int] = field(default_factory=set)
    needs_all: bool = False


@runtime_checkable
class FunctionInterception(Protocol):
    """Intercepts functions of torch in one thread."""

    thread: int

    def intercept_all(self) -> None: ...

    def observe_operators(self) -> bool:
        """Intercept fused attention and softmax alone; False where that is impossible."""

    def observe(self, name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Receive a call of one of these operators."""

    def end_pass(self) -> None:
        """Forget the tensors that were followed from function to function."""


class Interception:
    """Intercepts a model's calls: all of them, until one pass of the same form was followed.

    From then on the only hooks are on modules that attend (unless their calls tell all that is
    needed), on those that contain several calls of attention, and on those that begin a pass; no
    function mode is on. A pass that takes another way is still detected: modules that were not
    called so far keep their hooks, and calls of `scaled_dot_product_attention` and of a softmax are
    observed as operators. Any such call starts the interception of everything again.
    """

    def __init__(
        self,
        model: nn.Module,
        understanding: Understanding,
        functions: FunctionInterception,
        hook: Callable[[nn.Module, Hooks], None],
    ) -> None:
        self._model = model
        self._modules = {id(module): module for module in model.modules()}
        self._known, self._functions, self._hook = understanding, functions, hook
        self._hooks: dict[int, Hooks] = {}
        self._learning: Hashable = None
        self.is_whole = False

    def open(self) -> None:
        """Intercept what is needed before the first pass begins."""
        if self._known.calls and not self._known.needs_all:
            self.narrow()
        else:
            self.widen()

    def close(self) -> None:
        """Remove all hooks."""
        for hooks in self._hooks.values():
            hooks.close()
        self._hooks.clear()

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is called and none was active: a pass begins."""
        known = self._known
        if in_backward() or in_func_transform():  # a pass within a pass, or state that is restored
            return
        call = _way_of(module, args, kwargs)
        is_here = threading.get_ident() == self._functions.thread
        if is_here and call in known.calls and not known.needs_all:
            self._learning = None
            if self.is_whole or not is_observing(self._functions.observe):
                self.narrow()
            return
        self._learning = call if is_here else None
        known.needed.add(id(module))
        self.widen()

    def end(self, module: nn.Module) -> None:
        """A pass has ended: if it was followed as a whole, passes of its form are understood."""
        if self.is_whole and module is self._model:
            self._functions.end_pass()
        if self._learning is not None:
            self._known.calls.add(self._learning)
            self._learning = None

    def enter(self, module: nn.Module) -> None:
        """A module is called within a pass."""
        if not self.is_whole and id(module) not in self._known.called:
            self.start_over()

    def start_over(self) -> None:
        """Intercept everything from now on: a pass takes a way that no pass has taken before."""
        self._known.calls.clear()
        self._learning = None
        self.widen()

    def widen(self) -> None:
        """Intercept every call of a module or function."""
        if threading.get_ident() == self._functions.thread:
            self._functions.intercept_all()
        if not self.is_whole:
            for key, module in self._modules.items():
                self._hook_once(key, module)
        self.is_whole = True

    def narrow(self) -> None:
        """Intercept the calls that are needed, and those of modules that were never called."""
        if not self._functions.observe_operators():
            self.widen()
            return
        if self._hooks and not self.is_whole:
            return
        for key, module in self._modules.items():
            unhooked = self._known.unhooked.get(key, False)
            is_needed = key in self._known.needed and not unhooked
            is_needed |= key not in self._known.called
            if is_needed:
                self._hook_once(key, module)
            elif key in self._hooks:
                self._hooks[key].close()
                del self._hooks[key]
        self.is_whole = False

    def _hook_once(self, key: int, module: nn.Module) -> None:
        if key not in self._hooks:
            hooks = self._hooks[key] = Hooks()  # noted before it holds anything
            self._hook(module, hooks)


def _way_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """How a module is called, apart from the values and lengths of its tensors."""
    named = tuple((name, _kind(value)) for name, value in kwargs.items())
    mode = module.training, torch.is_grad_enabled()
    return id(module), mode, tuple(map(_kind, args)), named


def _kind(value: Any) -> object:
    return value if value is None or isinstance(value, bool | str) else type(value)
