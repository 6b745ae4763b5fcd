"""Training as a monitor sees it: its passes from step to step, and the events of a trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise._torch_private import call_forward_pre_hooks, forward_pre_hooks, wrapped_by_compiler
from headwise.models import Hooks
from headwise.watch import Recorder


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that distribute or compile it."""
    inner = wrapped_by_compiler(model)
    if isinstance(model, DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


# A generator, not the context manager of torch: the garbage collector closes it, which restores the
# stance after an interrupt in the lines that enter or leave its block.
@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled, also what is compiled while the block runs."""
    with torch.compiler.set_stance("force_eager"):
        yield


class StepWatch:
    """Records the training passes of a model, and only those, while it is open.

    A training pass is a call of the model in training mode with gradients, so evaluation and
    generation between two steps do not count. All hooks are on the model during a pass only.
    Between passes there is a single hook, so that users' code there (optimizers, modes, a
    backward pass that computes layers again) runs undisturbed.

    Compiled code would not run the hooks. While the watch is open the model runs uncompiled, and
    afterwards the code that was compiled before is used again.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder
        self._step_hooks, self._pass_hooks = Hooks(), Hooks()
        self.is_open = self._in_pass = self._is_training = False

    def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._step_hooks.enter_context(_uncompiled())
            self._step_hooks.before(self._model, self._begin, with_kwargs=True)

    def close(self) -> None:
        self._end()
        self._step_hooks.close()
        self.is_open = False

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_training = model.training and torch.is_grad_enabled()
        if not self._is_training or self._in_pass:
            return
        earlier = set(forward_pre_hooks(model))
        self._in_pass = True
        try:
            recording = self._recorder.recording(condition=lambda: self._is_training)
            self._pass_hooks.enter_context(recording)
            self._pass_hooks.after(model, self._end, always_call=True)
            # This pass has begun already, so it would not call hooks that are registered now.
            call_forward_pre_hooks(model, args, kwargs, skip=earlier)
        except BaseException:
            self._end()
            raise

    def _end(self, *_: Any) -> None:
        self._in_pass = False
        self._pass_hooks.close()


class TrainerEvents:
    """A callback of `transformers.Trainer` that ignores the events it has no method for."""

    if not TYPE_CHECKING:  # so that type checkers still find a misspelled name

        def __getattr__(self, name: str) -> Callable[..., None]:
            # A trainer calls a method for each of its events, and versions add events.
            if name.startswith("on_"):
                return lambda *_, **__: None
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
