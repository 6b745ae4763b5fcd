"""What is known of the attention calls of a model, and where they go while it is captured."""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise._torch_private import (
    can_observe_operators,
    in_backward,
    in_func_transform,
    is_wrapped,
)
from headwise.capture._attention_modules import cross_by_name, is_attention
from headwise.capture._call import Answer, AttentionCall, OnCall, OnRepeat
from headwise.capture._running_calls import ModuleCall, RunningCalls
from headwise.capture._site import Site
from headwise.capture._stacks import find_stacks, stack_of
from headwise.capture._unsupported import Unsupported, why_unsupported
from headwise.errors import UnsupportedError
from headwise.models import first_head_of

_NO_ATTENTION = "a softmax that is not attention"
_NO_SOFTMAX = "called, but without a softmax over queries and keys in this thread"


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


@dataclass(frozen=True, eq=False)
class _Pass:
    """A forward pass that is captured.

    Attributes:
        thread: The one that runs it; None while the whole model does not run.
        part: Otherwise, the number of the call of a part of the model that runs by itself.
        times: By module, how often it has attended, and the number of its latest call.
    """

    thread: int | None = None
    part: int | None = None
    times: dict[int, tuple[int, int]] = field(default_factory=dict)


class Capture:
    """Captures the attention calls of one model, while it is open. It may be opened again.

    Sites are numbered in the order of their first calls. A module that is called several times in
    one pass, such as a shared layer, has one site for each call. But calls on parts of the same
    queries share a site: an image tower may attend within one image after the other.

    Attributes:
        stacks: The stacks of the model, as `find_stacks` gives them.
        receiver: Where calls go; None while it is closed. Hooks that outlive a capture do nothing.
        is_paused: Whether the calls of this pass are not wanted.
        modules: The modules of the model, by identity.
        shared: What the calls of a pass have in common.
        captured_elsewhere: The number of running functions that report their attention themselves.
        called: The modules that were called and whose name says that they attend, by identity.
        by_hand: Whether the model computes softmax attention by hand in a pass that was followed.
        is_following: Whether each function of torch that this pass calls is followed now.
        is_followed: Whether any forward pass was followed.
        unsupported: Why attention of a module is not captured, by the module's identity.
        other_softmax: The modules with a softmax that is not attention, by identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.stacks = model, find_stacks(model)
        self.modules: dict[int, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._name_modules()
        self.receiver: Receiver | None = None
        self.is_paused = False
        self.shared: dict[Hashable, Any] = {}
        self.captured_elsewhere = 0
        self.called: set[int] = set()
        self.by_hand = self.is_following = self.is_followed = False
        self.unsupported: dict[int, Unsupported] = {}
        self.other_softmax: set[int] = set()
        self._sites: dict[tuple[int, int], Site] = {}
        self._pass = _Pass()
        self._running = RunningCalls(self.modules)
        self._receiving: int | None = None  # the thread whose attention call is received

    def open(self, receiver: Receiver) -> None:
        """Begin, or begin again: modules may have been added."""
        self._name_modules()
        self._pass, self.captured_elsewhere, self.is_following = _Pass(), 0, False
        self.receiver = receiver

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

    @property
    def sites(self) -> list[Site]:
        """The sites of all calls so far, in the order of their first calls."""
        return list(self._sites.values())

    @property
    def needs_functions(self) -> bool:
        """Whether a pass is to be followed from function to function, or else by operators."""
        # A replacement of torch's function, as by `fast_attention`, may call other kernels.
        return self.by_hand or not self.is_followed or not can_observe_operators()

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

    def may_answer(self, *inputs: Tensor, ours: bool = False) -> bool:
        """Whether `answer` may replace the model's kernel: not under gradients or a compiler."""
        receiver = self.receiver
        if receiver is None or receiver.answer is None or not (ours or receiver.answers_others):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
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
                self.unsupported[id(call.module)] = why
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
            site = self._sites.get(self._key(module, q, module_call))
            if site is None or q.shape[2] not in module_call.shape[1:]:  # which may be refused
                return False
            return receiver.on_repeat(site, alike, module_call, q, k)
        finally:
            self._receiving = None

    def _begin_receiving(self) -> None:
        # Parts of a model that are called by themselves are no pass, but must not meet here either.
        thread = threading.get_ident()
        for active in (self._receiving, self._pass.thread):
            if active not in (None, thread):
                self._check_thread(active)
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
        follow: Callable[[], None],
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
        self._check_thread(self._pass.thread)
        if in_backward():  # gradient checkpointing may run all of it again, and then end
            return
        self._pass, self.captured_elsewhere = _Pass(threading.get_ident()), 0
        if self.needs_functions:
            follow()

    def end(
        self, end_pass: Callable[[bool], None], model: nn.Module, _: Any, output: Any = None
    ) -> None:
        """A forward pass of the whole model has ended."""
        self._pass = _Pass()
        self._running.clear()
        self.shared.clear()
        # There, modes would not outlive what runs.
        if self.is_following and not (in_backward() or in_func_transform()):
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

    def site_of(self, call: AttentionCall) -> Site:
        """The site of a call, added if it is new."""
        key = self._key(call.module, call.q, call.module_call)
        if key not in self._sites:
            self._sites[key] = self._new_site(call)
        return self._sites[key]

    def known_site(self, call: AttentionCall) -> Site | None:
        """The site of a call that the model is about to compute; None if it is new."""
        return self._sites.get(self._key(call.module, call.q, call.module_call))

    def unsupported_by_name(self) -> dict[str, Unsupported]:
        """Modules whose attention cannot be captured, by name, and why."""
        why = self.unsupported
        return {name: why[key] for key, name in self._names.items() if key in why}

    def uncaptured(self) -> list[Site]:
        """Modules that should attend but were not captured, each with its name and the reason."""
        names = self._names
        reasons = {name: why.reason for name, why in self.unsupported_by_name().items()}
        known = [*reasons, *(site.name for site in self._sites.values())]
        silent: list[str] = []
        for key, name in names.items():  # outer modules come first
            near = any(_inside(name, place) or _inside(place, name) for place in known + silent)
            if is_attention(self.modules[key]) and not near:
                silent.append(name)
                reasons[name] = _NO_SOFTMAX if key in self.called else "not called"
        others = [name for key, name in names.items() if key in self.other_softmax]
        return [
            Site(name, stack_of(self.stacks, name, bool(cross_by_name(name))), reason=reason)
            for name, reason in [
                *reasons.items(),
                *((name, _NO_ATTENTION) for name in others if name not in reasons),
            ]
        ]

    def _call_of(self, module: nn.Module) -> ModuleCall | None:
        """The call of a module that has not returned yet."""
        for call in self._running:
            if call.module is module:
                self._running.keep(call)
                return call
        return None

    def _key(self, module: nn.Module, q: Tensor, module_call: ModuleCall | None) -> tuple[int, int]:
        """The identity of a module, and how often it attended earlier in this pass."""
        if self._pass.thread is None:  # a part of the model that is called by itself is a pass, too
            for outermost in deque(self._running, maxlen=1):
                self._running.keep(outermost)
                if outermost.number != self._pass.part:
                    self._pass = _Pass(part=outermost.number)
        times, latest = self._pass.times.get(id(module), (0, -1))
        number = 0 if module_call is None else module_call.number
        if number != latest or not (module_call is None or _share_memory(module_call.queries, q)):
            times += 1
            self._pass.times[id(module)] = times, number
        if module_call is not None:
            module_call.queries = q  # kept alive, so that its memory is not reused
        return id(module), times - 1

    def _new_site(self, call: AttentionCall) -> Site:
        name = self._names.get(id(call.module), type(call.module).__name__)
        cross = cross_by_name(name)
        if cross is None:
            cross = call.cross
        if cross is None:
            cross = self._is_cross_attention(call)
        stack = stack_of(self.stacks, name, cross)
        layer = sum(site.stack == stack for site in self._sites.values())
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        return Site(
            name,
            stack,
            layer,
            heads,
            kv_heads,
            cross,
            call.watched,
            kernel=call.kernel,
            statistics=call.statistics_kernel,
            first_head=first_head_of(call.module, heads),
        )

    def _is_cross_attention(self, call: AttentionCall) -> bool:
        """Whether the keys belong to another text, by the inputs of the modules around."""
        T, S = call.q.shape[2], call.k.shape[2]
        for around in (*filter(None, [call.module_call]), *self._running):
            is_cross = around.is_cross_attention(T, S)
            if is_cross is not None:
                return is_cross
        return S < T


def _share_memory(queries: Tensor | None, later: Tensor) -> bool:
    """Whether two tensors are parts of one."""
    if queries is None:
        return False
    return queries.untyped_storage().data_ptr() == later.untyped_storage().data_ptr()


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or outer == ""
