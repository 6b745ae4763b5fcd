"""The attentions of a model, each with the output projection that mixes its heads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from torch import nn

from headwise._evaluation import in_evaluation
from headwise.capture import AttentionCall, Site, capture_calls
from headwise.errors import UnsupportedError
from headwise.models import Hooks, check_weights
from headwise.models.texts import text_alone
from headwise.ownership._model_runs import example_input, float_tensors, run
from headwise.ownership._projection import (
    HeadsOfCall,
    OutputProjection,
    find_projections,
    is_linear,
    is_whole_linear,
)
from headwise.tables import Head, HeadsLike, resolve_heads

_ONLY_WATCH = "Watch this model without editing its heads."
_NO_PROJECTION = "heads: {} has no output projection of its own that is a plain linear layer: {}"


@dataclass(frozen=True)
class Attention:
    """An attention of a model, with its output projection.

    Attributes:
        site: Where it is, and how many heads it has.
        module: The module that computes the attention.
        projection: The output projection that mixes its heads; None if none was found.
        nth: Which call of the module in one pass it is, if layers share their weights.
        rows: In how many rows it attended in the pass that found it; more than there are texts
            if windows or frames of a text are rows of their own.
        unprojected: Why it has no output projection, and what can be done.
        lender: The site of the earlier layer whose keys it attends to; None if it has its own.
    """

    site: Site
    module: nn.Module
    projection: OutputProjection | None
    nth: int
    rows: int = field(default=1, compare=False)
    unprojected: str = field(default="", compare=False)
    lender: Site | None = field(default=None, compare=False)

    @property
    def output(self) -> OutputProjection:
        """The output projection, for whatever needs its weights."""
        if self.projection is None:
            raise UnsupportedError(_NO_PROJECTION.format(self.site, self.unprojected))
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

    The model runs in evaluation mode, without gradients, and is not changed. The output projection
    of an attention is the linear layer that receives the outputs of its heads, whatever its name.

    Args:
        model: Any model that `observe` can watch.
        batch: Its inputs: keyword arguments, a tuple of arguments, or a single argument. None
            generates a short example input.
        needs_projections: Whether an attention without an output projection that is a module,
            such as one whose `W_O` is a bare parameter, is refused.
    Raises:
        ArgumentError: no batch is given and none can be generated.
        UnsupportedError: no attention was captured, or no plain linear layer receives the outputs
            of heads.
    """
    check_weights("heads", model, offloaded=True)
    batch = example_input(model) if batch is None else batch
    calls = list[HeadsOfCall]()

    def record(call: AttentionCall) -> None:
        site = active.sites.of(call)
        if any(known.site == site for known in calls):
            raise UnsupportedError(
                f"heads: {site} attends several times in one pass, so edits of its heads "
                f"are ambiguous. Watch this model without editing its heads."
            )
        # Heads that a linear layer has mixed go no further, so that by the next attention they need
        # not be kept and compared with the inputs of all modules.
        for known in calls:
            if any(map(is_whole_linear, known.receivers)):
                known.outputs = None
        nth = sum(known.module is call.module for known in calls)
        calls.append(HeadsOfCall(site, call.module, nth, call.k, call.heads.transpose(1, 2)))

    def note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        for heads in calls:
            heads.note_input(module, args)

    def note_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if calls:
            calls[-1].note_output(module, args, output)

    with in_evaluation(model):
        with Hooks() as hooks:
            active = hooks.enter_context(capture_calls(model, record))
            for module in model.modules():
                # Before all other hooks, which may edit the heads.
                hooks.before(module, note_input, prepend=True)
                if is_linear(module):
                    hooks.after(module, note_output)
            with text_alone("heads", model, batch):
                outputs = float_tensors(run(model, batch))
        attentions = [
            _with_projection(model, heads, found, calls[:index])
            for index, (heads, found) in enumerate(
                zip(calls, find_projections(model, batch, calls, outputs), strict=True)
            )
        ]
    attentions = _without_shared_projections(attentions)
    if not attentions:
        raise UnsupportedError(
            f"heads: no attention was captured in {type(model).__name__}. Give a model "
            f"that headwise.observe can watch."
        )
    if needs_projections:
        for attention in attentions:
            _ = attention.output  # which raises
    return attentions


def _without_shared_projections(attentions: list[Attention]) -> list[Attention]:
    """The attentions, without projections that mix heads of several modules: it is unknown whose
    heads a call of one receives."""
    result = []
    for attention in attentions:
        projection = attention.projection
        others = [
            other.site.name
            for other in attentions
            if projection is not None
            and other.projection is not None
            and other.projection.module is projection.module
            and other.module is not attention.module
        ]
        if projection is not None and others:
            why = f"its heads and those of {others[0]} go into {projection.name}. {_ONLY_WATCH}"
            attention = replace(attention, projection=None, unprojected=why)
        result.append(attention)
    return result


def _with_projection(
    model: nn.Module,
    heads: HeadsOfCall,
    found: tuple[nn.Module | None, str],
    earlier: Sequence[HeadsOfCall],
) -> Attention:
    """The attention, with the linear layer that its heads went into, or why there is none."""
    module, why = found
    names = {module: name for name, module in model.named_modules()}
    n_heads = heads.site.n_heads
    projection = None if module is None else OutputProjection(names[module], module, n_heads)
    # Layers that share keys hand on the very tensor; equal values alone could be chance.
    keys = heads.keys.data_ptr()
    lenders = [other.site for other in earlier if keys and other.keys.data_ptr() == keys]
    lender = lenders[0] if lenders else None
    rows = len(heads.keys)
    return Attention(heads.site, heads.module, projection, heads.nth, rows, why, lender)


def heads_of(attentions: Iterable[Attention]) -> list[Head]:
    """The address of every head, in the order in which the attentions run."""
    return [head for attention in attentions for head in attention.site.heads()]


def by_attention(heads: HeadsLike, attentions: list[Attention]) -> dict[Attention, list[int]]:
    """The chosen heads of each attention; attentions without any are left out."""
    by_layer = {(a.site.stack, a.site.layer): a for a in attentions}
    chosen: dict[Attention, list[int]] = {}
    for head in sorted(resolve_heads(heads, heads_of(attentions))):
        chosen.setdefault(by_layer[head.stack, head.layer], []).append(head.head)
    return chosen
