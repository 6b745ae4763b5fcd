"""Which layer of which stack a call belongs to, and which share of its queries is captured."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from headwise.models._libraries import first_head_of
from headwise.models.capture._call import AttentionCall
from headwise.models.capture._capture import Capture
from headwise.models.capture._running import ModuleCall
from headwise.models.capture._stacks import Stacks, cross_by_name, is_attention
from headwise.tables import Head

_NO_ATTENTION = "not watched: a softmax that is not attention"


@dataclass(frozen=True, eq=False)  # sites are looked up at every call, by identity
class Site:
    """A place in a model where heads attend, or where attention is expected but not captured.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty if the model has one.
        layer: Its index in that stack, in the order in which layers are called; -1 if no call
            was captured.
        cross: Whether its keys belong to another text than its queries.
        watched: How its calls are captured; or why none was, beginning with "not".
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
    watched: str = "not called"
    kernel: str = ""
    statistics: str = ""
    coverage: str = ""
    first_head: int = 0

    def heads(self) -> tuple[Head, ...]:
        numbers = range(self.first_head, self.first_head + self.n_heads)
        return tuple(Head(self.stack, self.layer, head) for head in numbers)

    def kv_heads(self) -> list[int]:
        """The key/value head that each head reads."""
        share = self.n_heads // self.n_kv_heads
        return [head.head // share for head in self.heads()]


class Sites:
    """The sites of one model, numbered in the order of their first calls.

    A module that is called several times in one pass, such as a shared layer, has one site for
    each call. But calls on parts of the same queries share a site: an image tower may attend
    within one image after the other.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stacks = Stacks(model)
        self._modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self._sites: dict[tuple[int, int], Site] = {}
        # Of this pass, by module: how often it attended, and the number of its latest call.
        self._module_calls: dict[int, tuple[int, int | None]] = {}
        self._pass: object = None

    def all(self) -> list[Site]:
        return list(self._sites.values())

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def uncaptured(self, capture: Capture) -> list[Site]:
        """Modules that should attend but were not captured, each with its name and the reason."""
        why = capture.unsupported
        reasons = {name: why[key] for key, name in self._names.items() if key in why}
        known = [*reasons, *(site.name for site in self._sites.values())]
        silent: list[str] = []
        for name, module in self._modules.items():  # outer modules come first
            near = any(_inside(name, place) or _inside(place, name) for place in known + silent)
            if is_attention(module) and not near:
                silent.append(name)
        reasons |= {name: _reason(self._modules[name], capture) for name in silent}
        others = [name for key, name in self._names.items() if key in capture.other_softmax]
        reasons = dict.fromkeys(others, _NO_ATTENTION) | reasons
        return [
            Site(name, self.stacks.of(name, bool(cross_by_name(name))), watched=reason)
            for name, reason in sorted(reasons.items(), key=lambda item: item[1] == _NO_ATTENTION)
        ]

    def known(self, call: AttentionCall, capture: Capture) -> Site | None:
        """The site of a call that the model is about to compute; None if it is new."""
        return self._sites.get(self._key(call, capture))

    def of(self, call: AttentionCall, capture: Capture) -> Site:
        """The site of a call, added if it is new."""
        key = self._key(call, capture)
        if key not in self._sites:
            self._sites[key] = self._new(call, capture)
        return self._sites[key]

    def _key(self, call: AttentionCall, capture: Capture) -> tuple[int, int]:
        """The identity of a module, and how often it attended earlier in this pass."""
        current, module_call = capture.current_pass, capture.call_of(call.module)
        number = None if module_call is None else module_call.number
        if isinstance(current, ModuleCall):
            current = "part", current.number
        if current is None or current != self._pass:
            self._module_calls, self._pass = {}, current
        n, latest = self._module_calls.get(id(call.module), (0, -1))
        shares = module_call is None or _shares_memory(module_call.queries, call.q)
        if number != latest or not shares:
            n += 1
            self._module_calls[id(call.module)] = n, number
        if module_call is not None:
            module_call.queries = call.q  # kept alive, so that its memory is not reused
        return id(call.module), n - 1

    def _new(self, call: AttentionCall, capture: Capture) -> Site:
        name = self.name_of(call.module)
        cross = cross_by_name(name)
        if cross is None:
            cross = call.cross
        if cross is None:
            cross = capture.is_cross_attention(call.q.shape[2], call.k.shape[2])
        stack = self.stacks.of(name, cross)
        layer = sum(site.stack == stack for site in self._sites.values())
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        how = (call.watched, call.kernel, call.statistics_kernel)
        first_head = first_head_of(call.module, heads)
        return Site(name, stack, layer, heads, kv_heads, cross, *how, first_head=first_head)


def _shares_memory(queries: Tensor | None, later: Tensor) -> bool:
    """Whether two tensors are parts of one."""
    if queries is None:
        return False
    return queries.untyped_storage().data_ptr() == later.untyped_storage().data_ptr()


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.") or outer == ""


def _reason(module: nn.Module, capture: Capture) -> str:
    if id(module) in capture.called:
        return "not captured: called, but without a softmax over queries and keys in this thread"
    return "not called"


@dataclass(slots=True)
class Covered:
    """How many queries were captured, and how many tokens the module received.

    Attributes:
        window: Tokens per window, where each window counts as a text; 0: no windows.
    """

    captured: int
    tokens: int
    window: int = 0

    def __add__(self, more: "Covered") -> "Covered":
        window = max(self.window, more.window)
        return Covered(self.captured + more.captured, self.tokens + more.tokens, window)

    def __str__(self) -> str:
        if self.captured < self.tokens:
            return f"{self.captured} queries for {self.tokens} tokens"
        return f"windows of {self.window} tokens, each as a text" if self.window else "all queries"


class Coverage:
    """The coverage of each site, summed over all its calls."""

    def __init__(self) -> None:
        self._sums: dict[Site, Covered] = {}
        self._latest: dict[Site, Covered] = {}

    def add(
        self, site: Site, call: AttentionCall, module_call: ModuleCall | None, tokens: int | None
    ) -> None:
        """Count the queries of a call. Calls within one call of a module share its tokens."""
        covered = _covered(call, module_call, tokens)
        if module_call is None or _is_first(module_call, site):
            self._latest[site] = covered
        else:
            covered = Covered(covered.captured, 0, covered.window)
            self._latest[site] += covered
        self._sums[site] = self.of(site) + covered

    def copy(self) -> "Coverage":
        """The same sums, to go back to."""
        same = Coverage()
        same._sums, same._latest = dict(self._sums), dict(self._latest)
        return same

    def of(self, site: Site) -> Covered:
        """The coverage of a site over all its calls."""
        return self._sums.get(site, Covered(0, 0))

    def latest(self, site: Site) -> str:
        """The coverage of the latest call of a site's module, as text; empty if not watched."""
        return str(self._latest[site]) if site in self._latest else ""


def _covered(call: AttentionCall, module_call: ModuleCall | None, tokens: int | None) -> Covered:
    B, T = call.q.shape[0], call.q.shape[2]
    shape = None if module_call is None else module_call.shape
    if shape is not None and T not in shape and shape[1] > T:
        if shape[0] * shape[1] == B * T:
            return Covered(B * T, B * T, T)
        return Covered(B * T, B * shape[1])
    if tokens is not None and tokens > T:  # latents or pooled positions instead of tokens
        return Covered(B * T, B * tokens)
    return Covered(B * T, B * T)


def _is_first(module_call: ModuleCall, site: Hashable) -> bool:
    is_first = site not in module_call.counted
    module_call.counted.add(site)
    return is_first
