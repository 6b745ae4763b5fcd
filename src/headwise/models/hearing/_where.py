"""Which layer of which stack an attention call belongs to."""

from dataclasses import dataclass

from torch import nn

from headwise.heads import Head
from headwise.models.hearing._call import Call
from headwise.models.hearing._stacks import Stacks


@dataclass(frozen=True)
class Site:
    """A place in a model where heads attend.

    Attributes:
        name: The module's qualified name.
        stack: The stack it belongs to; empty where the model has one.
        layer: Its place in that stack, in the order in which layers are called.
        cross: Whether its keys belong to another text than its queries.
        kernel: What computes the model's own answer.
    """

    name: str
    stack: str
    layer: int
    n_heads: int
    n_kv_heads: int
    cross: bool
    kernel: str

    def heads(self) -> tuple[Head, ...]:
        return tuple(Head(self.stack, self.layer, head) for head in range(self.n_heads))


class Sites:
    """The sites of one model, numbered as they are first called.

    A module that is called several times in one pass, as shared layers are, is as many sites.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stacks = Stacks(model)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._found: dict[tuple[int, int], Site] = {}
        self._calls: dict[int, int] = {}
        self._pass = -1

    def all(self) -> list[Site]:
        return list(self._found.values())

    def of(self, call: Call, forward_pass: int) -> Site:
        """The site of a call, found or new."""
        if forward_pass != self._pass:
            self._calls, self._pass = {}, forward_pass
        nth = self._calls.get(id(call.module), 0)
        self._calls[id(call.module)] = nth + 1
        key = (id(call.module), nth)
        if key not in self._found:
            self._found[key] = self._new(call)
        return self._found[key]

    def _new(self, call: Call) -> Site:
        name = self._names.get(id(call.module), type(call.module).__name__)
        stack, cross = self.stacks.of(name, call.cross)
        layer = sum(site.stack == stack for site in self._found.values())
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        return Site(name, stack, layer, heads, kv_heads, cross, call.kernel)
