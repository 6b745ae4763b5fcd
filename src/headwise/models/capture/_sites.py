"""Which layer of which stack an attention call belongs to."""

from dataclasses import dataclass

from torch import Tensor, nn

from headwise.models.capture._active_modules import ActiveModules, ModuleCall
from headwise.models.capture._call import AttentionCall
from headwise.models.capture._stacks import Stacks, is_attention
from headwise.tables import Head


@dataclass(frozen=True)
class Site:
    """A place in a model where heads attend, or where they were expected to and not heard.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty where the model has one.
        layer: Its place in that stack, in the order in which layers are called; -1 where no
            head was heard.
        cross: Whether its keys belong to another text than its queries.
        watched: How its calls are heard; or why none was, beginning with "not".
        kernel: What computes the model's own answer.
        statistics: What computes its statistics.
        coverage: Which of a text's queries its latest pass captured: all of them, some (the rest of
            a block-sparse attention is not read, say), or all within windows.
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

    def heads(self) -> tuple[Head, ...]:
        return tuple(Head(self.stack, self.layer, head) for head in range(self.n_heads))


class Sites:
    """The sites of one model, numbered as they are first called.

    A module that is called several times in one pass, as shared layers are, is as many sites. But
    calls on parts of the same queries are one site's: a tower attends within one image after the
    other.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stacks = Stacks(model)
        self._modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self._found: dict[tuple[int, int], Site] = {}
        self.unsupported: dict[str, str] = {}  # why, by the name of a module
        self._turns: dict[int, list[ModuleCall | None]] = {}
        self._pass: ModuleCall | None = None

    def all(self) -> list[Site]:
        return list(self._found.values())

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def unheard(self, running: ActiveModules) -> list[Site]:
        """Modules that should attend, and of which nothing was heard: each by name, and why."""
        unread = [
            name
            for name, module in self._modules.items()
            if running.unread.get(id(module), 0) > (2 if is_attention(module) else 3)
        ]
        unread = [name for name in unread if name not in self.unsupported]
        known = [*unread, *self.unsupported] + [site.name for site in self._found.values()]
        silent: list[str] = []
        for name, module in self._modules.items():  # those around others come first
            near = any(_inside(name, one) or _inside(one, name) for one in known + silent)
            if is_attention(module) and not near:
                silent.append(name)
        why = {name: _why(self._modules[name], running) for name in unread + silent}
        return [
            Site(name, self.stacks.of(name, False)[0], watched=reason)
            for name, reason in (self.unsupported | why).items()
        ]

    def known(self, call: AttentionCall, running: ActiveModules) -> Site | None:
        """The site of a call that is about to be made, if it is not new."""
        return self._found.get(self._turn(call, running))

    def of(self, call: AttentionCall, running: ActiveModules) -> Site:
        """The site of a call, found or new."""
        key = self._turn(call, running)
        if key not in self._found:
            self._found[key] = self._new(call)
        return self._found[key]

    def _turn(self, call: AttentionCall, running: ActiveModules) -> tuple[int, int]:
        """A module, and how many turns it had in this pass before the one of this call."""
        outermost, run = running.outermost, running.run_of(call.module)
        if outermost is not self._pass:
            self._turns, self._pass = {}, outermost
        turns = self._turns.setdefault(id(call.module), [])
        # A module whose `forward` was called past its hooks has no run: it has one turn.
        known = bool(turns) and turns[-1] is run
        if not known or (run is not None and not _shared(run.queries, call.q)):
            turns.append(run)
        if run is not None:
            run.queries = call.q  # held, so that no other queries come to lie in its memory
        return id(call.module), len(turns) - 1

    def _new(self, call: AttentionCall) -> Site:
        name = self.name_of(call.module)
        stack, cross = self.stacks.of(name, call.cross)
        layer = sum(site.stack == stack for site in self._found.values())
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        how = (call.watched, call.kernel, call.statistics_kernel)
        return Site(name, stack, layer, heads, kv_heads, cross, *how)


def _shared(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors are parts of one."""
    if one is None:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.") or other == ""


def _why(module: nn.Module, running: ActiveModules) -> str:
    if id(module) in running.unread:
        return "not read: a softmax whose product with values was not found"
    if id(module) in running.called:
        return "not heard: called, and no softmax of queries and keys was seen (in this thread)"
    return "not called"
