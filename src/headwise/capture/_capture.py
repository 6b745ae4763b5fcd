"""The attention calls of a model, and where they go while it is captured."""

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise._torch_private import in_backward, is_wrapped, needs_gradient
from headwise.capture._call import Answer, AttentionCall, OnCall, OnRepeat
from headwise.capture._running_calls import ModuleCall, RunningCalls
from headwise.capture._sites import Sites
from headwise.capture._stacks import find_stacks
from headwise.capture._uncaptured import Uncaptured
from headwise.capture._unsupported import why_unsupported
from headwise.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Receiver:
    """Where the calls of an open capture go.

    Attributes:
        on_call: Is called with each attention call that the model has computed.
        answer: May compute the heads of a call in place of the model; None: nothing does.
        answers_others: Whether `answer` may replace kernels that are not ours.
        keep_graph: Whether captured tensors stay attached to the autograd graph.
        on_repeat: May take a call by its queries and keys; None: each call is described.
    """

    on_call: OnCall
    answer: Answer | None = None
    answers_others: bool = True
    keep_graph: bool = False
    on_repeat: OnRepeat | None = None


class Capture:
    """Captures the attention calls of one model, while it is open. It may be opened again.

    Attributes:
        stacks: The stacks of the model, as `find_stacks` gives them.
        modules: The modules of the model, by identity.
        sites: Where they attend.
        uncaptured: Which of them should attend, but were not captured.
        by_hand: Whether the model computes softmax attention by hand; None: no pass has told.
        receiver: Where calls go; None while it is closed. Hooks that outlive a capture do nothing.
        is_paused: Whether the calls of this pass are not wanted.
        follows_graphs: Whether graphs of compiled code hand over their calls.
        shared: What the calls of a pass have in common.
        captured_elsewhere: The number of running functions that report their attention themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stacks = model, find_stacks(model)
        self.modules: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._name_modules()
        self._running = RunningCalls(self.modules)
        self.sites = Sites(self._names, self.stacks, self._running)
        self.uncaptured = Uncaptured(self.modules, self._names, self.stacks)
        self.by_hand: bool | None = None
        self.receiver: Receiver | None = None
        self.is_paused = self.follows_graphs = False
        self.shared: dict[Hashable, Any] = {}
        self.captured_elsewhere = 0
        self._receiving: int | None = None  # the thread whose attention call is received

    def open(self, receiver: Receiver) -> None:
        """Begin, or begin again: modules may have been added."""
        self._name_modules()
        self.sites.begin_pass(None)
        self.receiver, self.captured_elsewhere = receiver, 0

    def close(self) -> None:
        self.receiver = None
        self._running.clear()
        self.shared.clear()

    @property
    def is_open(self) -> bool:
        return self.receiver is not None

    def _name_modules(self) -> None:
        for name, module in self.model.named_modules():
            self.modules[id(module)], self._names[id(module)] = module, name

    @property
    def is_active(self) -> bool:
        """Whether calls are captured now."""
        return self.is_open and not self.is_paused

    def detach(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors without their autograd graph, unless the graph is kept."""
        keep = self.keeps_graph
        return [x if keep or not x.requires_grad else x.detach() for x in tensors]

    @property
    def keeps_graph(self) -> bool:
        """Whether captured tensors stay attached to the autograd graph."""
        return self.receiver is not None and self.receiver.keep_graph

    def innermost(self, *ignored: type[nn.Module]) -> nn.Module | None:
        """The innermost module that runs and is not of an ignored type; None if none runs."""
        modules = (call.module for call in self._running)
        return next((module for module in modules if not isinstance(module, ignored)), None)

    def may_answer(self, *inputs: Tensor, given: Iterable[Any] = (), ours: bool = False) -> bool:
        """Whether `answer` may replace the model's kernel: not under gradients or a compiler.

        Args:
            inputs: Queries, keys and values.
            given: The other arguments of the call, such as a mask that is learned.
        """
        receiver = self.receiver
        if receiver is None or receiver.answer is None or not (ours or receiver.answers_others):
            return False
        needs_grad = needs_gradient(*[x for x in (*inputs, *given) if isinstance(x, Tensor)])
        is_empty = not all(x.numel() for x in inputs)
        return not (needs_grad or is_empty or torch.compiler.is_compiling())

    def answer_to(self, call: AttentionCall) -> Tensor | None:
        """The heads of a call that the model has not computed, if `answer` gives them."""
        call.module_call = self._call_of(call.module)
        try:
            answer = None if self.receiver is None else self.receiver.answer
            return None if answer is None else answer(call)
        finally:
            call.module_call = None

    def on_call(self, call: AttentionCall) -> None:
        """Receive an attention call that the model has computed."""
        receiver = self.receiver
        if receiver is None or not call.heads.numel():
            return
        self._begin_receiving()
        try:
            call.module_call = self._call_of(call.module)
            why = why_unsupported(call, self._running)
            if why is None:
                receiver.on_call(call)
            else:
                self.uncaptured.unsupported[id(call.module)] = why
        finally:
            self._receiving = call.module_call = None

    def repeats(self, alike: Hashable, module: nn.Module, q: Tensor, k: Tensor) -> bool:
        """Receive a call by its queries and keys, if nothing else of it is needed: see `OnRepeat`.

        To describe a call takes half of what watching it does.
        """
        receiver = self.receiver
        if receiver is None or receiver.on_repeat is None or is_wrapped(q):
            return False
        self._begin_receiving()
        try:
            module_call = self._call_of(module)
            if module_call is None or module_call.shape is None:
                return False
            site = self.sites.known(module, q, module_call)
            if site is None or q.shape[2] not in module_call.shape[1:]:  # which may be refused
                return False
            return receiver.on_repeat(site, alike, module_call, q, k)
        finally:
            self._receiving = None

    def _begin_receiving(self) -> None:
        # Parts of a model that are called by themselves are no pass, but must not meet here either.
        thread = threading.get_ident()
        for active in (self._receiving, self.sites.thread):
            if active not in (None, thread):
                self.check_thread(active)
        self._receiving = thread

    def compute_uncaptured(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that reports its attention itself, whatever it calls in turn."""
        self.captured_elsewhere += 1
        try:
            return compute(*args, **kwargs)
        finally:
            self.captured_elsewhere -= 1

    def begin(
        self,
        begin_pass: Callable[[], None],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A forward pass of the whole model begins."""
        values = [*args, *kwargs.values()]
        if any(isinstance(x, Tensor) and x.is_meta for x in values):
            raise UnsupportedError(
                f"observe: {type(model).__name__} is called on the meta device, which holds no "
                f"numbers. Load its weights, and give it inputs on their device."
            )
        self.check_thread(self.sites.thread)
        if in_backward():  # gradient checkpointing may run all of it again, and then end
            return
        self.captured_elsewhere = 0
        self.sites.begin_pass(threading.get_ident())
        begin_pass()

    def end(
        self, end_pass: Callable[[bool], None], model: nn.Module, _: Any, output: Any = None
    ) -> None:
        """A forward pass of the whole model has ended."""
        self.sites.begin_pass(None)
        self._running.clear()
        self.shared.clear()
        end_pass(output is not None)

    def check_thread(self, active: int | None) -> None:
        """Forward passes may come from any thread, but one after the other."""
        if active is None or active == threading.get_ident():
            return
        if any(alive.ident == active for alive in threading.enumerate()):
            raise UnsupportedError(
                f"observe: {type(self.model).__name__} runs in two threads at once. "
                f"Run one after the other, or watch a copy in each (copy.deepcopy)."
            )

    def _call_of(self, module: nn.Module) -> ModuleCall | None:
        """The call of a module that has not returned yet."""
        for call in self._running:
            if call.module is module:
                self._running.keep(call)
                return call
        return None
