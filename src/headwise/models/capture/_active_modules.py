"""Which modules of a model are active during a forward pass, and what inputs they received."""

import inspect
import threading
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise._torch_private import in_backward, in_func_transform, without_function_modes
from headwise.errors import UnsupportedError
from headwise.models._hooks import Hooks
from headwise.models.capture._call import Answer, AttentionCall, OnCall, uncompiled
from headwise.models.capture._interception import (
    FunctionInterception,
    Interception,
    Understanding,
)
from headwise.models.capture._module_call import ModuleCall, reason_unsupported


def _token_vectors(args: Iterable[Any]) -> list[Tensor]:
    return [x for x in args if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()]


def _n_ids(values: Iterable[Any]) -> int | None:
    """The length of the first argument that may be token ids; None if none may."""
    ids = (x for x in values if isinstance(x, Tensor) and x.ndim == 2)
    return next((x.shape[1] for x in ids if not x.is_floating_point()), None)


def _running(known: Container[int]) -> list[nn.Module]:
    """The innermost of some modules that is being called, found without a hook; none if none is."""
    frame = inspect.currentframe() if known else None
    while frame is not None:
        module = frame.f_locals.get("self")  # of `forward`, or of what torch calls it from
        if isinstance(module, nn.Module) and id(module) in known:
            return [module]
        frame = frame.f_back
    return []


def _ignore(_: AttentionCall) -> None:
    """The callback where nothing captures calls."""


class ActiveModules:
    """The active modules of one model, and the callbacks that receive its attention calls.

    Attributes:
        answer: May compute the heads of a call in place of the model; None: nothing does.
        answers_others: Whether `answer` may replace kernels that are not ours.
        keep_graph: Whether captured tensors stay attached to the autograd graph.
        calls: The module calls that have not returned, the innermost last.
        captured_elsewhere: How many active modules or functions have a capture of their own,
            so that the function mode must skip what they call.
        understanding: What earlier passes have shown about the model.
        interception: What intercepts its calls.
        is_open: Whether the capture still runs. Whatever remains of a closed one does nothing.
    """

    def __init__(
        self,
        on_call: OnCall = _ignore,
        answer: Answer | None = None,
        *,
        answers_others: bool = True,
        keep_graph: bool = False,
        understanding: Understanding | None = None,
    ) -> None:
        self._on_call = on_call
        self._receive_uncompiled = uncompiled(self._receive)
        self.answer, self.keep_graph = answer, keep_graph
        self.answers_others = answers_others
        self.calls: list[ModuleCall] = []
        self.is_open = True
        self.captured_elsewhere = 0
        self.understanding = understanding or Understanding()
        self.interception: Interception | None = None

    @property
    def called(self) -> set[int]:
        """Every module that was called so far, by identity."""
        return self.understanding.called

    @property
    def is_whole(self) -> bool:
        """Whether every call of a module is followed, not only those that are needed."""
        return self.interception is None or self.interception.is_whole

    def detach(self, x: Tensor) -> Tensor:
        """The tensor without its autograd graph, unless the graph is kept."""
        return x if self.keep_graph or not x.requires_grad else x.detach()

    def detach_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same for several tensors."""
        for x in tensors:
            if x.requires_grad:
                return tuple(map(self.detach, tensors))
        return tensors

    def innermost(self, *ignored: type[nn.Module]) -> nn.Module:
        """The innermost active module that is not of an ignored type."""
        modules = [call.module for call in self.calls]
        if not self.is_whole:  # it may be a module without a hook
            modules += _running(self.understanding.unhooked)
        return next((m for m in reversed(modules) if not isinstance(m, ignored)), modules[-1])

    @property
    def outermost(self) -> ModuleCall | None:
        """The call that contains all others: of the whole model, or of a part by itself."""
        return self.calls[0] if self.calls else None

    def call_of(self, module: nn.Module) -> ModuleCall | None:
        """The call of a module that has not returned yet."""
        for call in reversed(self.calls):
            if call.module is module:
                return call
        return None

    def may_answer(self, *inputs: Tensor, ours: bool = False) -> bool:
        """Whether `answer` may replace the model's kernel: not under gradients or a compiler."""
        if self.answer is None or not (ours or self.answers_others):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return not needs_grad and not torch.compiler.is_compiling()

    def is_cross_attention(self, T: int, S: int) -> bool:
        """Whether the keys of the current attention call belong to another text."""
        for call in reversed(self.calls):
            is_cross = call.is_cross_attention(T, S)
            if is_cross is not None:
                return is_cross
        return S < T

    def on_call(self, call: AttentionCall) -> None:
        """Receive an attention call, in plain Python also where the model is compiled."""
        if torch.compiler.is_compiling():
            self._receive_uncompiled(call)
        else:
            self._receive(call)

    def _receive(self, call: AttentionCall) -> None:
        if self.is_whole:
            self.attends(call.module)
        elif self.calls:  # no hook on the module has asked for its thread
            self._check_thread(threading.get_ident())
        reason = reason_unsupported(call, self.call_of(call.module), self.calls)
        if reason is None:
            self._on_call(call)
        else:
            self.understanding.unsupported[id(call.module)] = reason

    def attends(self, module: nn.Module) -> None:
        """Record that a module attends: it is followed, and what contains several such modules."""
        if not self.is_whole:
            return
        needed = self.understanding.needed
        needed.add(id(module))
        for call in self.calls:
            call.attended += 1
            if call.attended > 1:
                needed.add(id(call.module))

    def needs_no_hook(self, call: AttentionCall) -> bool:
        """Whether a call tells by itself what a hook on its module has seen.

        It names the module, which attends once while it is called, with a query for each token
        that it receives.
        """
        inner = self.call_of(call.module)
        if not call.names_module or inner is None or inner is self.outermost:
            return False
        lengths = [x.shape[1] for x in inner.inputs[:1]]
        return inner.attended == 1 and lengths == [call.q.shape[2]]

    def hook_again(self, module: nn.Module) -> None:
        """Follow every call from now on: a module without a hook is called as in no pass before."""
        if self.interception is None or in_backward() or in_func_transform():
            return  # where hooks and modes would not outlive what runs
        self.understanding.unhooked[id(module)] = False
        self.interception.start_over()

    @contextmanager
    def follow(
        self,
        model: nn.Module,
        hooked: tuple[type[nn.Module], ...],
        functions: FunctionInterception,
    ) -> Iterator[None]:
        """Track the calls of modules; those of types `hooked` have a capture of their own."""

        def hook(module: nn.Module, hooks: Hooks) -> None:
            enter = partial(self._enter, isinstance(module, hooked))
            hooks.before(module, enter, with_kwargs=True)
            hooks.after(module, self._leave, always_call=True)

        self.understanding.needed |= {id(m) for m in model.modules() if isinstance(m, hooked)}
        self.interception = Interception(model, self.understanding, functions, hook)
        self._start_over = uncompiled(self.interception.start_over)
        try:
            self.interception.open()
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Capture nothing from now on."""
        self.is_open = False
        if self.interception is not None:
            self.interception.close()

    def _enter(
        self, has_own_hook: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self.is_open:
            return
        is_compiled = torch.compiler.is_compiling()
        thread = 0 if is_compiled else threading.get_ident()
        if self.calls:
            self._check_thread(thread)
            self._leave(module)  # an interrupt may have left an earlier call open
        values = [*args, *kwargs.values()]
        if not self.calls and any(isinstance(x, Tensor) and x.is_meta for x in values):
            raise UnsupportedError(
                f"observe: {type(module).__name__} is called on the meta device, which holds no "
                f"numbers. Load its weights, and give it inputs on their device."
            )
        self._intercept(module, args, kwargs, is_compiled)
        is_whole = self.is_whole
        if is_whole and not is_compiled:
            # What is read here must not reach our own function mode, if it is on.
            with without_function_modes():
                inputs = _token_vectors(values)
        else:
            inputs = _token_vectors(values)
        if is_whole and self.calls:  # otherwise the projections inside have no hooks
            self.calls[-1].project(inputs)
        self.calls.append(ModuleCall(module, inputs, has_own_hook, _n_ids(values), thread=thread))
        self.called.add(id(module))
        self.captured_elsewhere += has_own_hook

    def _intercept(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_compiled: bool
    ) -> None:
        """Decide what is intercepted from now on: everything in what is compiled."""
        interception = self.interception
        if interception is None:
            return
        if is_compiled:
            self.understanding.needs_all = True
            if not interception.is_whole:
                self._start_over()
        elif self.calls:
            interception.enter(module)
        else:
            interception.begin(module, args, kwargs)

    def _check_thread(self, thread: int) -> None:
        """Forward passes may come from any thread, but one after the other."""
        active = self.calls[0].thread
        if thread and active and thread != active:
            if any(alive.ident == active for alive in threading.enumerate()):
                raise UnsupportedError(
                    f"observe: {type(self.calls[0].module).__name__} runs in two threads at once. "
                    f"Run one after the other, or watch a copy in each (copy.deepcopy)."
                )
            self._leave(self.calls[0].module)  # a thread that was interrupted left it open

    def _leave(self, module: nn.Module, *_: Any) -> None:
        """End the call of a module, and all calls inside it."""
        for place in range(len(self.calls)):
            if self.calls[place].module is module:
                break
        else:
            return
        for call in self.calls[place:]:
            self.captured_elsewhere -= call.has_own_hook
            call.queries = None
        del self.calls[place:]
        if not self.calls and self.interception is not None:
            self.interception.end(module)
