"""What a capture knows: the model, where its calls go, and what runs around an attention call."""

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from headwise._torch_private import in_backward, in_func_transform
from headwise.errors import UnsupportedError
from headwise.layer import HeadAttention
from headwise.models.capture._call import Answer, AttentionCall, OnCall
from headwise.models.capture._running import ModuleCall, reason_unsupported, running_calls

# Layers with a plain hook of their own: what they call in turn is not captured.
HOOKED = (HeadAttention, nn.MultiheadAttention)


class Capture:
    """Captures the attention calls of one model, while it is open. It may be opened again.

    Attributes:
        receiver: Is called with each attention call.
        answer: May compute the heads of a call in place of the model; None: nothing does.
        answers_others: Whether `answer` may replace kernels that are not ours.
        keep_graph: Whether captured tensors stay attached to the autograd graph.
        modules: The modules of the model, by identity.
        is_open: Whether the capture runs. Whatever remains of a closed one does nothing.
        captured_elsewhere: How many functions run whose own calls are captured already.
        called: The modules that attend by their name and were called, by identity.
        by_hand: Whether a forward pass that was followed had a softmax that is attention.
        is_followed: Whether a forward pass was followed from function to function.
        unsupported: Why attention of a module is not captured, by the module's identity.
        thread: That of the forward pass that runs.
        other_softmax: The modules with a softmax that is not attention, by identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(module): module for module in model.modules()}
        self.answer: Answer | None = None
        self.receiver: OnCall | None = None
        self.answers_others = self.keep_graph = self.is_open = False
        self.captured_elsewhere = 0
        self.called: set[int] = set()
        self.by_hand = self.is_followed = False
        self.unsupported: dict[int, str] = {}
        self.other_softmax: set[int] = set()
        self.thread: int | None = None
        self._n_passes = 0
        self._receiving: int | None = None  # the thread whose attention call is received
        self._known: ModuleCall | None = None  # of the attention call that is received

    def detach(self, x: Tensor) -> Tensor:
        """The tensor without its autograd graph, unless the graph is kept."""
        return x if self.keep_graph or not x.requires_grad else x.detach()

    @property
    def current_pass(self) -> object:
        """What stands for the pass that runs; a part that is called by itself is one, too."""
        if self.thread is not None:
            return self._n_passes
        calls = [*running_calls(self.modules)]
        return calls[-1] if calls else None

    def call_of(self, module: nn.Module) -> ModuleCall | None:
        """The call of a module that has not returned yet."""
        if self._known is not None and self._known.module is module:
            return self._known
        return next((x for x in running_calls(self.modules) if x.module is module), None)

    def innermost(self, *ignored: type[nn.Module]) -> nn.Module | None:
        """The innermost module that runs and is not of an ignored type; None if none runs."""
        calls = running_calls(self.modules)
        return next((call.module for call in calls if not isinstance(call.module, ignored)), None)

    def is_cross_attention(self, T: int, S: int) -> bool:
        """Whether the keys of the current attention call belong to another text."""
        for call in chain(filter(None, [self._known]), running_calls(self.modules)):
            is_cross = call.is_cross_attention(T, S)
            if is_cross is not None:
                return is_cross
        return S < T

    def may_answer(self, *inputs: Tensor, ours: bool = False) -> bool:
        """Whether `answer` may replace the model's kernel: not under gradients or a compiler."""
        if self.answer is None or not (ours or self.answers_others):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return not needs_grad and not torch.compiler.is_compiling()

    def on_call(self, call: AttentionCall) -> None:
        """Receive an attention call that the model has computed."""
        if not self.is_open or self.receiver is None:
            return
        # Parts of a model that are called by themselves are no pass, but must not meet here either.
        self._check_thread(self._receiving)
        self._check_thread(self.thread)
        self._receiving = threading.get_ident()
        self._known = self.call_of(call.module)
        try:
            reason = reason_unsupported(call, self._known, running_calls(self.modules))
            if reason is None:
                self.receiver(call)
            else:
                self.unsupported[id(call.module)] = reason
        finally:
            self._known = self._receiving = None

    def begin(
        self,
        begin_pass: Callable[[], None],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A forward pass of the whole model begins."""
        values = [*args, *kwargs.values()]
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            raise UnsupportedError(
                f"observe: {type(model).__name__} is compiled while its heads are watched. Give "
                f"observe what torch.compile returned, which then runs uncompiled."
            )
        if any(isinstance(x, Tensor) and x.is_meta for x in values):
            raise UnsupportedError(
                f"observe: {type(model).__name__} is called on the meta device, which holds no "
                f"numbers. Load its weights, and give it inputs on their device."
            )
        self._check_thread(self.thread)
        if not in_backward():  # gradient checkpointing may run all of it again, and then end
            self.thread, self.captured_elsewhere = threading.get_ident(), 0
            self._n_passes += 1
            begin_pass()

    def end(
        self, end_pass: Callable[[bool], None], model: nn.Module, _: Any, output: Any = None
    ) -> None:
        self.thread = None
        # There, modes would not outlive what runs.
        if not (in_backward() or in_func_transform()):
            end_pass(output is not None)

    def _check_thread(self, active: int | None) -> None:
        """Forward passes may come from any thread, but one after the other."""
        if active is None or active == threading.get_ident():
            return
        if any(alive.ident == active for alive in threading.enumerate()):
            raise UnsupportedError(
                f"observe: {type(self.model).__name__} runs in two threads at once. "
                f"Run one after the other, or watch a copy in each (copy.deepcopy)."
            )

    def note_called(self, module: nn.Module, *_: Any) -> None:
        self.called.add(id(module))
