"""Attention calls, their sites in a model, and where they go while the model is captured."""

import inspect
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import (
    MODULE_CALL,
    can_observe_operators,
    in_backward,
    in_func_transform,
)
from headwise.errors import UnsupportedError
from headwise.kernels import (
    AttentionRule,
    RowRequest,
    RowStatistics,
    row_statistics,
    statistics_kernel,
)
from headwise.layer import HeadAttention
from headwise.models import HEADS, first_head_of
from headwise.tables import Head

Path = tuple[str, ...]

# Layers with a plain hook of their own: what they call in turn is not captured.
HOOKED = (HeadAttention, nn.MultiheadAttention)
_NO_ATTENTION = "a softmax that is not attention"
_NO_SOFTMAX = "called, but without a softmax over queries and keys in this thread"
# Parts of the names of cross-attention and of self-attention modules.
_CROSS = ("cross", "encoder_attn", "encdec")
_SELF = "self"
_SUFFIX = re.compile(r"_(model|tower)(?=\.|$)")
# The local variable, in the frame of a module's call, that holds what is known about the call.
_KNOWN = "_headwise_call"
# Parts of the names of arguments that are another text, as in cross-attention.
_CONTEXT = ("encoder", "context", "memory", "cross", "key", "source", "kv")


@dataclass(eq=False)
class ModuleCall:
    """A call of a module that has not returned yet.

    Attributes:
        queries: The queries of its latest attention call.
        number: Tells it apart from all others.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    queries: Tensor | None = None
    number: int = field(default_factory=count(1).__next__)

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The arguments that may be token vectors: float tensors with three axes."""
        values = *self.args, *self.kwargs.values()
        return [
            x for x in values if isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()
        ]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the token vectors that the module receives; None if that is unknown."""
        return tuple(self.inputs[0].shape) if self.inputs else None

    @property
    def n_ids(self) -> int | None:
        """The length of the first argument that may be token ids; None if none may."""
        tensors = (x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))
        ids = (x for x in tensors if x.ndim == 2 and not x.is_floating_point())
        return next((x.shape[1] for x in ids), None)

    def is_cross_attention(self, T: int, S: int) -> bool | None:
        """Whether `S` keys come from another text than `T` queries; None if that is unknown.

        More keys than queries are not enough: keys of the same text may come from a cache.
        """
        if not self.inputs:
            return None
        first, *others = self.inputs
        if others and first is others[0]:
            return False
        # Embeddings of positions are as long as the text that they are added to.
        if any(x.shape[1] == S and (S != T or self._is_context(x)) for x in others):
            return True
        return False if first.shape[1] == T else None

    def _is_context(self, x: Tensor) -> bool:
        """Whether the name of an argument says that it is another text."""
        parameters = inspect.signature(self.module.forward).parameters
        names = [name for name, value in self.kwargs.items() if value is x]
        names += [name for name, value in zip(parameters, self.args, strict=False) if value is x]
        return any(part in name for name in names for part in _CONTEXT)


@dataclass(eq=False)  # frozen, it would take longer to make than to describe
class AttentionCall:
    """The inputs of an attention call and the heads it returned.

    Attributes:
        module: The module that attends.
        rule: How weights follow from queries and keys.
        heads: The per-head outputs that the model computed, or what `join` makes of them;
            empty (width 0) if the model has not computed them yet.
        watched: How the call was captured.
        kernel: The name of the implementation that computed the heads.
        exact: Whether `heads` follows from the other fields: no weights were dropped.
        cross: Whether the keys belong to another text than the queries; None if the modules
            around the call decide.
        join: What the model applies to its heads before they become visible; None: nothing.
        real: False for keys that are padding, if the call itself says so.
        ours: Whether the model runs on the native kernel, whose statistics come with these heads
            to the last bit.
        module_call: The call of the module, while it has not returned; None if it is unknown.
        by_operator: Makes such a call of what an operator in a compiled graph is given; None if
            that does not tell all of it.
    """

    module: nn.Module
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B Hkv S D"]
    v: Float[Tensor, "B Hkv S Dv"]
    rule: AttentionRule
    heads: Float[Tensor, " B #H T _"]
    watched: str
    kernel: str
    exact: bool
    cross: bool | None = None
    join: Callable[[Tensor], Tensor] | None = None
    real: Bool[Tensor, "B S"] | None = None
    ours: bool = False
    module_call: ModuleCall | None = None
    by_operator: "Callable[..., AttentionCall] | None" = None

    @property
    def knows_logits(self) -> bool:
        """Whether the largest logit before any bias is known."""
        return True

    @property
    def statistics_kernel(self) -> str:
        """The kernel that computes the statistics of the call."""
        return statistics_kernel(self.q, self.k, self.v, self.rule)

    def row_statistics(self, request: RowRequest) -> RowStatistics:
        """The statistics of every row of weights; a largest logit that is unknown is NaN."""
        return row_statistics(self.q, self.k, self.v, self.rule, request)


OnCall = Callable[[AttentionCall], None]
# Computes the heads of a call in place of the model; None leaves the call to the model.
Answer = Callable[[AttentionCall], Float[Tensor, "B H T Dv"] | None]


def running_calls(modules: Container[int]) -> Iterator[ModuleCall]:
    """The calls of some modules that have not returned, the innermost first.

    Stack frames are read, because hooks would slow down every call of every module. The result is
    stored in its frame, so that two attention calls within one call of a module share it.

    Args:
        modules: Their identities.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            variables = frame.f_locals
            module = variables["self"]
            if id(module) in modules:
                call = variables.get(_KNOWN)
                if call is None:
                    call = ModuleCall(module, variables["args"], variables["kwargs"])
                    variables[_KNOWN] = call
                yield call
        frame = frame.f_back


def n_heads_of(module: nn.Module) -> int:
    """The number of heads that a module declares; 1 if it declares none."""
    counts = [getattr(module, name, None) for name in (*HEADS, "nhead")]
    return next((count for count in counts if isinstance(count, int) and count > 0), 1)


class Unsupported(NamedTuple):
    """Why a call is not attention between the tokens of a text.

    Attributes:
        is_layer: Whether the model mixes tokens or channels by it: with what is captured alone,
            a layer would be missing.
    """

    reason: str
    is_layer: bool = True


def why_unsupported(call: AttentionCall, around: Iterable[ModuleCall]) -> Unsupported | None:
    """Why a call is not attention between the tokens of a text; None if it is.

    The shapes of the module's inputs decide: a layer that receives windows attends within texts.

    Args:
        around: The calls of all modules that run.
    """
    shape = None if call.module_call is None else call.module_call.shape
    (B, H, T, _), S = call.q.shape, call.k.shape[2]
    if shape is None or T in shape[1:]:
        return None
    among = f"attends among {T} positions where it was given {shape[1]} tokens"
    if shape[1] > T and T not in shape and _are_chunks(call.module, H):
        return Unsupported(among)
    if any(outer.n_ids == T for outer in around):
        return None
    if T == S and shape[2] == H * T and call.v.shape[-1] == shape[1]:
        return Unsupported(f"attends among {T} channels of each head, not among tokens")
    if shape[1] != S and (shape[1] == H or B * T == shape[0] * shape[1] == B):
        # Such as the outputs of earlier layers, of which each token has its own.
        return Unsupported(f"attends among {S} positions for each of {shape[1]} tokens", False)
    windows = shape[0] * shape[1] == B * T
    return Unsupported(among) if shape[1] > T and T == S and not windows else None


def _are_chunks(module: nn.Module, H: int) -> bool:
    """Whether `H` heads are several chunks of the heads that a module declares."""
    heads = n_heads_of(module)
    return 1 < heads < H and H % heads == 0


@dataclass(frozen=True, eq=False)  # sites are looked up at every call, by identity
class Site:
    """A place in a model where heads attend, or where attention is expected but not captured.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty if the model has one.
        layer: Its index in that stack, in the order in which layers are called; -1 if no call
            was captured.
        cross: Whether its keys belong to another text than its queries.
        watched: How its calls are captured; empty where none was.
        reason: Why no call was captured; empty where one was.
        kernel: What computes the model's own output.
        statistics: What computes its statistics.
        coverage: Which of a text's queries its latest pass captured: all of them, some (the rest of
            a block-sparse attention is not read, say), or all within windows.
        first_head: The number of the first head that this process computes, above 0 under tensor
            parallelism.
    """

    name: str
    stack: str
    layer: int = -1
    n_heads: int = 0
    n_kv_heads: int = 0
    cross: bool = False
    watched: str = ""
    reason: str = ""
    kernel: str = ""
    statistics: str = ""
    coverage: str = ""
    first_head: int = 0

    def __str__(self) -> str:
        return self.name or "the model"  # the module of a model that is one attention

    def heads(self) -> tuple[Head, ...]:
        numbers = range(self.first_head, self.first_head + self.n_heads)
        return tuple(Head(self.stack, self.layer, head) for head in numbers)

    def kv_heads(self) -> list[int]:
        """The key/value head that each head reads."""
        share = self.n_heads // self.n_kv_heads
        return [n // share for n in range(self.first_head, self.first_head + self.n_heads)]


class Capture:
    """Captures the attention calls of one model, while it is open. It may be opened again.

    Sites are numbered in the order of their first calls. A module that is called several times in
    one pass, such as a shared layer, has one site for each call. But calls on parts of the same
    queries share a site: an image tower may attend within one image after the other.

    Attributes:
        stacks: The stacks of the model, as `find_stacks` gives them.
        receiver: Is called with each attention call.
        answer: May compute the heads of a call in place of the model; None: nothing does.
        answers_others: Whether `answer` may replace kernels that are not ours.
        keep_graph: Whether captured tensors stay attached to the autograd graph.
        is_paused: Whether the calls of this pass are not wanted.
        modules: The modules of the model, by identity.
        is_open: Whether the capture runs. Hooks that outlive a closed capture do nothing.
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
        self.answer: Answer | None = None
        self.receiver: OnCall | None = None
        self.answers_others = self.keep_graph = self.is_open = self.is_paused = False
        self.captured_elsewhere = 0
        self.called: set[int] = set()
        self.by_hand = self.is_following = self.is_followed = False
        self.unsupported: dict[int, Unsupported] = {}
        self.other_softmax: set[int] = set()
        self._sites: dict[tuple[int, int], Site] = {}
        # Of this pass, by module: how often it attended, and the number of its latest call.
        self._times: dict[int, tuple[int, int]] = {}
        self._part: int | None = None  # the call of the part of the model that runs by itself
        self._thread: int | None = None  # of the forward pass that runs
        self._receiving: int | None = None  # the thread whose attention call is received

    def open(self) -> None:
        """Begin, or begin again: modules may have been added."""
        self._name_modules()
        self.captured_elsewhere, self._thread = 0, None
        self.is_open, self.is_following = True, False

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
        return [x if self.keep_graph or not x.requires_grad else x.detach() for x in tensors]

    def innermost(self, *ignored: type[nn.Module]) -> nn.Module | None:
        """The innermost module that runs and is not of an ignored type; None if none runs."""
        calls = running_calls(self.modules)
        return next((call.module for call in calls if not isinstance(call.module, ignored)), None)

    def may_answer(self, *inputs: Tensor, ours: bool = False) -> bool:
        """Whether `answer` may replace the model's kernel: not under gradients or a compiler."""
        if self.answer is None or not (ours or self.answers_others):
            return False
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return not needs_grad and not torch.compiler.is_compiling()

    def answer_to(self, call: AttentionCall) -> Tensor | None:
        """The heads of a call that the model has not computed, if `answer` gives them."""
        call.module_call = self._call_of(call.module)
        heads = None if self.answer is None else self.answer(call)
        call.module_call = None
        return heads

    def on_call(self, call: AttentionCall) -> None:
        """Receive an attention call that the model has computed."""
        if not self.is_open or self.receiver is None:
            return
        # Parts of a model that are called by themselves are no pass, but must not meet here either.
        self._check_thread(self._receiving)
        self._check_thread(self._thread)
        self._receiving = threading.get_ident()
        try:
            call.module_call = self._call_of(call.module)
            why = why_unsupported(call, running_calls(self.modules))
            if why is None:
                self.receiver(call)
            else:
                self.unsupported[id(call.module)] = why
        finally:
            self._receiving = call.module_call = None

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
        self._check_thread(self._thread)
        if in_backward():  # gradient checkpointing may run all of it again, and then end
            return
        self._thread, self._part = threading.get_ident(), None
        self._times, self.captured_elsewhere = {}, 0
        if self.needs_functions:
            follow()

    def end(
        self, end_pass: Callable[[bool], None], model: nn.Module, _: Any, output: Any = None
    ) -> None:
        """A forward pass of the whole model has ended."""
        self._thread = None
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
        key = self._key(call)
        if key not in self._sites:
            self._sites[key] = self._new_site(call)
        return self._sites[key]

    def known_site(self, call: AttentionCall) -> Site | None:
        """The site of a call that the model is about to compute; None if it is new."""
        return self._sites.get(self._key(call))

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
        return next((x for x in running_calls(self.modules) if x.module is module), None)

    def _key(self, call: AttentionCall) -> tuple[int, int]:
        """The identity of a module, and how often it attended earlier in this pass."""
        module_call = call.module_call
        if self._thread is None:  # a part of the model that is called by itself is a pass, too
            part = [outer.number for outer in running_calls(self.modules)][-1:]
            if not part or part[0] != self._part:
                self._times, self._part = {}, part[0] if part else None
        times, latest = self._times.get(id(call.module), (0, -1))
        number = 0 if module_call is None else module_call.number
        shares = module_call is None or _shares_memory(module_call.queries, call.q)
        if number != latest or not shares:
            times += 1
            self._times[id(call.module)] = times, number
        if module_call is not None:
            module_call.queries = call.q  # kept alive, so that its memory is not reused
        return id(call.module), times - 1

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
        for around in chain(filter(None, [call.module_call]), running_calls(self.modules)):
            is_cross = around.is_cross_attention(T, S)
            if is_cross is not None:
                return is_cross
        return S < T


def _shares_memory(queries: Tensor | None, later: Tensor) -> bool:
    """Whether two tensors are parts of one."""
    if queries is None:
        return False
    return queries.untyped_storage().data_ptr() == later.untyped_storage().data_ptr()


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or outer == ""


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention module, according to its class."""
    name = type(module).__name__.lower()
    known = isinstance(module, nn.MultiheadAttention | HeadAttention)
    return known or "attention" in name or "attn" in name


def _belongs_to_attention(name: str, module: nn.Module) -> bool:
    """Whether a module belongs to an attention, according to its own name or its class."""
    last = name.rsplit(".", 1)[-1].lower()
    return is_attention(module) or "attention" in last or "attn" in last


def find_stacks(model: nn.Module) -> dict[str, str]:
    """The stacks of a model: its encoder and decoder, or its towers for text and images.

    A stack is a part of the model that holds numbered layers with attention. A model with a
    single such part has one stack, named "".

    Returns:
        The qualified name of the module that holds each stack, by the stack's name; empty if there
        is one stack.
    """
    attending = [
        name for name, module in model.named_modules() if _belongs_to_attention(name, module)
    ]
    parents = {_parent_of_layers(name) for name in attending if _is_numbered(name)}
    paths = [path for path in parents if not any(_within(path, outer) for outer in parents)]
    return _named(_shortest_distinct(paths)) if len(paths) > 1 else {}


def stack_of(stacks: Mapping[str, str], module_name: str, cross: bool) -> str:
    """The stack of a module; that of cross-attention is another one."""
    names = [name for name, root in stacks.items() if f"{module_name}.".startswith(f"{root}.")]
    return ".".join([*names, "cross"] if cross else names)


def cross_by_name(module_name: str) -> bool | None:
    """Whether a module is cross-attention; None if its name does not say."""
    for part in reversed(module_name.lower().split(".")):
        is_cross = any(word in part for word in _CROSS)
        if is_cross or (_SELF in part and part != _SELF):  # BERT's cross-attention has a "self"
            return is_cross
    return None


def _is_numbered(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _parent_of_layers(name: str) -> Path:
    """The path of the module that holds the numbered list of layers."""
    parts = tuple(name.split("."))
    first = [part.isdigit() for part in parts].index(True)
    return parts[: max(0, first - 1)]


def _within(path: Path, outer: Path) -> bool:
    return path != outer and path[: len(outer)] == outer


def _common(a: Path, b: Path) -> int:
    """The number of leading parts that two paths share."""
    equal = [part == part_of_b for part, part_of_b in zip(a, b, strict=False)]
    return [*equal, False].index(False)


def _shortest_distinct(paths: list[Path]) -> list[Path]:
    """The shortest prefix of each path that no other path shares."""
    return [p[: 1 + max(_common(p, q) for q in paths if q != p)] for p in paths]


def _named(roots: list[Path]) -> dict[str, str]:
    """The roots by their shortest distinct names, without suffixes such as `_model`."""
    shared = min(_common(a, b) for a in roots for b in roots)
    names = [".".join(root[shared:]).lower() for root in roots]
    short = [_SUFFIX.sub("", name) for name in names]
    paths = map(".".join, roots)
    return dict(zip(short if len(set(short)) == len(names) else names, paths, strict=True))
