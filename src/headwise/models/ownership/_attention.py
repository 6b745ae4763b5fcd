"""The attentions of a model, each with the output projection that mixes its heads."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._interrupts import reversible
from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.models._compiled import run_uncompiled
from headwise.models._hooks import Hooks
from headwise.models.capture import ActiveModules, AttentionCall, Site, Sites, capture_calls
from headwise.models.ownership._example_input import example_input, run
from headwise.models.ownership._projection import OutputProjection, output_projection
from headwise.tables import Head, HeadsLike, resolve_heads

_NO_PROJECTION = (
    "heads: {} has no output projection that is a plain linear layer. "
    "Merge adapters and unpack quantised weights first."
)


@dataclass(frozen=True)
class Attention:
    """An attention of a model, with its output projection.

    Attributes:
        site: Where it is, and how many heads it has.
        module: The module that computes the attention.
        projection: The output projection that mixes its heads; None if a bare parameter does.
        nth: Which call of the module in one pass it is, if layers share their weights.
        rows: In how many rows it attended in the pass that found it; more than there are texts
            if windows or frames of a text are rows of their own.
    """

    site: Site
    module: nn.Module
    projection: OutputProjection | None
    nth: int
    rows: int = field(default=1, compare=False)

    @property
    def output(self) -> OutputProjection:
        """The output projection, for whatever needs its weights.

        Raises:
            UnsupportedError: there is none.
        """
        if self.projection is None:
            raise UnsupportedError(_NO_PROJECTION.format(self.site.name))
        return self.projection

    @property
    def around(self) -> str:
        """The name of the smallest module with both the attention and its output projection."""
        pairs = zip(self.site.name.split("."), self.output.name.split("."), strict=False)
        return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def called(self) -> bool:
        """Whether the output projection is called as a module; torch's own layer never calls it."""
        return not isinstance(self.module, nn.MultiheadAttention)


def find_attentions(
    model: nn.Module, batch: Any = None, *, needs_projections: bool = True
) -> list[Attention]:
    """Find the attentions of a model by running it once.

    The model runs in evaluation mode, without gradients, and is not changed. The run also checks
    that each output projection receives the outputs of the heads unchanged.

    Args:
        model: Any model that `observe` can watch.
        batch: Its inputs: keyword arguments, a tuple of arguments, or a single argument. None
            generates a short example input.
        needs_projections: Whether an attention without an output projection that is a module,
            such as one whose `W_O` is a bare parameter, is refused.
    Raises:
        ArgumentError: no batch is given and none can be generated.
        UnsupportedError: no attention was captured, or the outputs of heads are changed before
            the output projection.
    """
    batch = example_input(model) if batch is None else batch
    search = _Search(model, needs_projections)
    with search.capturing():
        run(model, batch)
    return search.result()


def heads_of(attentions: Iterable[Attention]) -> list[Head]:
    """The address of every head, in the order in which the attentions run."""
    return [head for attention in attentions for head in attention.site.heads()]


def by_attention(heads: HeadsLike, attentions: list[Attention]) -> dict[Attention, list[int]]:
    """The chosen heads of each attention; attentions without any are left out.

    Raises:
        HeadError: a head does not exist, is named twice, or a pair could mean several.
    """
    by_layer = {(a.site.stack, a.site.layer): a for a in attentions}
    chosen: dict[Attention, list[int]] = {}
    for head in sorted(resolve_heads(heads, heads_of(attentions))):
        chosen.setdefault(by_layer[head.stack, head.layer], []).append(head.head)
    return chosen


class _Search:
    """Captures the attention calls of one pass and follows heads to their output projections."""

    def __init__(self, model: nn.Module, needs_projections: bool) -> None:
        self._model, self._needs_projections = model, needs_projections
        self._sites = Sites(model)
        self._running = ActiveModules()
        self._calls: dict[int, int] = {}
        self._attentions: list[Attention] = []
        self._unchecked: dict[Attention, Float[Tensor, "B T H Dv"]] = {}

    @reversible
    def capturing(self) -> Iterator[None]:
        with run_uncompiled(), Hooks() as hooks:
            self._running = hooks.enter_context(capture_calls(self._model, self._record))
            for module in self._model.modules():
                # Before all other hooks, which may edit the heads.
                hooks.before(module, self._check_inputs, prepend=True)
            yield

    def result(self) -> list[Attention]:
        if not self._attentions:
            raise UnsupportedError(
                f"heads: no attention was captured in {type(self._model).__name__}. Give a model "
                f"that headwise.observe can watch."
            )
        for attention in self._unchecked:
            raise UnsupportedError(
                f"heads: {attention.site.name} changes its heads before "
                f"{attention.output.name} mixes them, so they cannot be separated there. "
                f"Watch this model without editing its heads."
            )
        return self._attentions

    def _record(self, call: AttentionCall) -> None:
        site = self._sites.of(call, self._running)
        output = output_projection(self._model, site)
        if output is None and self._needs_projections:
            raise UnsupportedError(_NO_PROJECTION.format(site.name))
        if any(known.site == site for known in self._attentions):
            raise UnsupportedError(
                f"heads: {site.name} attends several times in one pass, so edits of its heads "
                f"are ambiguous. Watch this model without editing its heads."
            )
        nth = self._calls.get(id(call.module), 0)
        self._calls[id(call.module)] = nth + 1
        attention = Attention(site, call.module, output, nth, len(call.heads))
        self._attentions.append(attention)
        if output is not None and attention.called and not self._is_known(call.module):
            self._unchecked[attention] = call.heads.transpose(1, 2)

    def _is_known(self, module: nn.Module) -> bool:
        """Whether it belongs to our own layer, whose gate may scale its heads."""
        layers = [m for m in self._model.modules() if isinstance(m, MultiHeadAttention)]
        return any(layer.attention is module for layer in layers)

    def _check_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for attention, heads in list(self._unchecked.items()):
            x = args[0] if args else None
            if attention.output.module is not module or not isinstance(x, Tensor):
                continue
            if x.numel() == heads.numel() and torch.equal(x.reshape(heads.shape), heads):
                del self._unchecked[attention]
