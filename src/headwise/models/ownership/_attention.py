"""Every place of a model where heads attend, each with the projection that mixes its heads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.models._hooks import Hooks
from headwise.models.capture import ActiveModules, AttentionCall, Site, Sites, capture_calls
from headwise.models.ownership._example_input import example_input, run
from headwise.models.ownership._projection import OutputProjection, output_projection
from headwise.tables import Head, HeadsLike, resolve_heads


@dataclass(frozen=True)
class Attention:
    """A place where heads attend and are mixed.

    Attributes:
        site: Where it is, and how many heads it has.
        module: The module that attends.
        output: What mixes its heads.
        nth: Which call of the module in one pass it is, for layers that share their weights.
    """

    site: Site
    module: nn.Module
    output: OutputProjection
    nth: int

    @property
    def around(self) -> str:
        """The name of the smallest module with both the attention and its output projection."""
        here, there = self.site.name.split("."), self.output.name.split(".")
        common = zip(here, there, strict=False)
        return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], common))

    @property
    def called(self) -> bool:
        """Whether its output projection is called as a module; torch's own layer never does."""
        return not isinstance(self.module, nn.MultiheadAttention)


def find_attentions(model: nn.Module, batch: Any = None) -> list[Attention]:
    """Find every place where heads attend, by running the model once.

    The model runs in evaluation mode, without gradients, and is left as it was. That each
    output projection is given the heads as they are is checked, not assumed.

    Args:
        model: Any model that can be watched.
        batch: What to run it on: its keyword arguments, a tuple of arguments, or the only one.
            None is a short text made up for it, where one can be.
    Raises:
        ArgumentError: no batch is given and none can be made up.
        UnsupportedError: no attention was heard, or heads reach no output projection as they are.
    """
    search = _Search(model)
    with search.watching():
        run(model, example_input(model) if batch is None else batch)
    return search.found()


def heads_of(attentions: Iterable[Attention]) -> list[Head]:
    """The address of every head, in the order of the calls."""
    return [head for attention in attentions for head in attention.site.heads()]


def by_attention(wanted: HeadsLike, attentions: list[Attention]) -> dict[Attention, list[int]]:
    """Which heads of which attention are meant, for those that are meant at all.

    Raises:
        HeadError: a head does not exist, is named twice, or a pair could mean several.
    """
    heads = resolve_heads(wanted, heads_of(attentions))
    of = {(a.site.stack, a.site.layer): a for a in attentions}
    found: dict[Attention, list[int]] = {}
    for head in sorted(heads):
        found.setdefault(of[head.stack, head.layer], []).append(head.head)
    return found


class _Search:
    """Listens to one pass and follows heads to their projections."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sites = Sites(model)
        self._running = ActiveModules()
        self._calls: dict[int, int] = {}
        self._found: list[Attention] = []
        self._unproved: dict[Attention, Float[Tensor, "B T H Dv"]] = {}

    @reversible
    def watching(self) -> Iterator[None]:
        with Hooks() as hooks:
            self._running = hooks.enter_context(capture_calls(self._model, self._hear))
            for module in self._model.modules():
                # First of all: others may be taking heads away already.
                hooks.before(module, self._prove, prepend=True)
            yield

    def found(self) -> list[Attention]:
        if not self._found:
            raise UnsupportedError(
                f"heads: no attention was heard in {type(self._model).__name__}. Give a model "
                f"that headwise.observe can watch."
            )
        for attention in self._unproved:
            raise UnsupportedError(
                f"heads: {attention.site.name} does something to its heads before "
                f"{attention.output.name} mixes them, so they cannot be told apart there. "
                f"Watch this model, but leave its heads as they are."
            )
        return self._found

    def _hear(self, call: AttentionCall) -> None:
        site = self._sites.of(call, self._running)
        output = output_projection(self._model, site)
        if output is None:
            raise UnsupportedError(
                f"heads: {site.name} has no output projection that is a plain linear layer. "
                f"Merge adapters and unpack quantised weights first."
            )
        if any(one.site == site for one in self._found):
            raise UnsupportedError(
                f"heads: {site.name} attends several times in one run, so what is done to its "
                f"heads cannot be told apart. Watch this model, but leave its heads as they are."
            )
        nth = self._calls.get(id(call.module), 0)
        self._calls[id(call.module)] = nth + 1
        attention = Attention(site, call.module, output, nth)
        self._found.append(attention)
        if attention.called and not self._is_known(call.module):
            self._unproved[attention] = call.heads.transpose(1, 2)

    def _is_known(self, module: nn.Module) -> bool:
        """Whether it is our own layer, whose gate may scale its heads first."""
        layers = [m for m in self._model.modules() if isinstance(m, MultiHeadAttention)]
        return any(layer.attention is module for layer in layers)

    def _prove(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for attention, heads in list(self._unproved.items()):
            given = args[0] if args else None
            if attention.output.module is module and isinstance(given, Tensor):
                same = given.numel() == heads.numel() and torch.equal(
                    given.reshape(heads.shape), heads
                )
                if same:
                    del self._unproved[attention]
