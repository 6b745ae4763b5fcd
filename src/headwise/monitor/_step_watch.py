"""Watch the training passes of a model from one optimizer step to the next."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise._interrupts import uninterrupted
from headwise.models import AttentionCall, Hooks, capture_calls
from headwise.watch import Watch


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what shares it out over ranks or compiles it."""
    inner = getattr(model, "_orig_mod", None)  # as `torch.compile` calls it
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


class StepWatch:
    """While it is open, a watch hears the training passes of a model, and nothing else.

    A training pass is a call of the model in training mode and with gradients, so evaluation
    and generation between two steps are not heard. Within a pass the whole apparatus is there;
    between passes nothing but one hook on the model, so what users do there (optimizers, modes,
    a backward pass that computes layers again) meets nothing of ours.

    Compiled code would not see the hooks. While the window is open the compiler stands aside, and
    afterwards the code that it had compiled runs on as it was.
    """

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        self._model, self._watch = model, watch
        self._step, self._pass = Hooks(), Hooks()
        self.is_open = self._in_pass = self._counts = False

    @uninterrupted
    def open(self) -> None:
        if not self.is_open:
            self._step.enter_context(torch.compiler.set_stance("force_eager"))
            self._step.before(self._model, self._begin, with_kwargs=True)
            self.is_open = True

    @uninterrupted
    def close(self) -> None:
        self._end()
        self._step.close()
        self.is_open = False

    @uninterrupted
    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counts = model.training and torch.is_grad_enabled()
        if not self._counts or self._in_pass:
            return
        there = set(model._forward_pre_hooks)
        try:
            self._pass.enter_context(self._watch.hearing.inputs.follow())
            self._watch.hearing.running = self._pass.enter_context(capture_calls(model, self._hear))
            self._pass.after(model, self._end, always_call=True)
            # This pass has begun: it would not call the hooks that have just been hung up.
            for number, hook in list(model._forward_pre_hooks.items()):
                if number in model._forward_pre_hooks_with_kwargs and number not in there:
                    hook(model, args, kwargs)
                elif number not in there:
                    hook(model, args)
        except BaseException:
            self._pass.close()
            raise
        self._in_pass = True

    def _hear(self, call: AttentionCall) -> None:
        if self._counts:
            self._watch.hearing.hear(call)

    @uninterrupted
    def _end(self, *_: Any) -> None:
        self._in_pass = False
        self._pass.close()
