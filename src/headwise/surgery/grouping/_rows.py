"""Where the queries, keys and values of an attention come from: rows of its linear layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._interrupts import slowly_reversible
from headwise.errors import UnsupportedError
from headwise.models import Attention, Parts, attached_parts, hooked, is_linear, is_transposed

_WORDS = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True, eq=False)
class Rows:
    """Which outputs of a linear layer are the features of which head.

    Attributes:
        name: The qualified name of the layer.
        index: The outputs of each head, one for each of its features.
    """

    name: str
    index: Int[Tensor, "n D"]

    def read(self, model: nn.Module) -> Float[Tensor, "n D in_and_bias"]:
        """What makes the features, in double precision; the bias, or zeros, as a last column."""
        weight, bias = _parts_of(model.get_submodule(self.name))
        weight = weight.detach().double()
        last = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().double()
        return torch.cat([weight, last[:, None]], 1)[self.index]

    @torch.no_grad()
    def write(self, model: nn.Module, rows: Float[Tensor, "n D in_and_bias"]) -> None:
        """Write what `read` gave, changed, into a model."""
        weight, bias = _parts_of(model.get_submodule(self.name))
        weight[self.index] = rows[..., :-1].to(weight)
        if bias is not None:
            bias[self.index] = rows[..., -1].to(bias)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the queries, keys and values of one attention come from."""

    q: Rows
    k: Rows
    v: Rows

    @property
    def n_kv_heads(self) -> int:
        return len(self.k.index)


@dataclass(frozen=True, eq=False)
class Trace:
    """What one attention computed, still attached to what the linear layers around it gave.

    Attributes:
        parts: Its queries, keys and values, head by head.
        outputs: What each layer gave, by its name, in the order of the calls.
    """

    parts: Parts
    outputs: Mapping[str, Float[Tensor, "B T n"]]


@slowly_reversible
def traced(
    model: nn.Module, attentions: Sequence[Attention], batch: Any
) -> Iterator[dict[Attention, Trace]]:
    """Run a model once and follow what its attentions compute back to linear layers.

    Args:
        attentions: Of those that share a module, the first.
    """
    names = {module: name for name, module in model.named_modules() if is_linear(module)}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs.setdefault(names[module], output)

    first = {attention.module: attention for attention in attentions}
    with (
        hooked(after=[(module, note) for module in names]),
        attached_parts(model, first, batch) as parts,
    ):
        yield {a: Trace(parts[a.module], _around(a, outputs)) for a in attentions}


def layout_of(attention: Attention, trace: Trace) -> Layout:
    """Find where queries, keys and values come from.

    Raises:
        UnsupportedError: those of a head are not just so many outputs of one linear layer.
    """
    return Layout(*(_rows_of(attention, trace, part) for part in _WORDS))


def _rows_of(attention: Attention, trace: Trace, part: str) -> Rows:
    where, what = attention.site.name, _WORDS[part]
    if part not in trace.parts:
        raise UnsupportedError(
            f"group_heads: {where} shows its {what} to nobody: its attention is written out. Load "
            f"the model with attn_implementation='sdpa', or leave its heads as they are."
        )
    heads = trace.parts[part]
    touched = _touched(heads, trace.outputs)
    if touched:
        name = [*touched][-1]  # what was called before made what this one was given
        users = touched[name]
        # Keys that a group of queries shares may have been repeated for each of them.
        own = [h for h in range(len(users)) if h == 0 or not users[h].equal(users[h - 1])]
        index = [users[h].nonzero().flatten() for h in own]
        apart = users[own].sum(0).max() == 1
        if apart and {len(one) for one in index} == {heads.shape[-1]}:
            return Rows(name, torch.stack(index))
    raise UnsupportedError(
        f"group_heads: the {what} of the heads of {where} are not rows of one linear layer, each "
        f"head's apart, as under a norm over all heads or in latent attention. Leave its heads as "
        f"they are."
    )


def _touched(
    heads: Float[Tensor, "H B T D"], outputs: Mapping[str, Tensor]
) -> dict[str, Bool[Tensor, "H n"]]:
    """Which outputs of each layer the heads depend on; layers that none depends on left out."""
    # Drawn, since under equal factors gradients could cancel; the same in each run.
    factors = torch.randn(heads.shape[1:], generator=torch.Generator().manual_seed(0))
    grads = [
        torch.autograd.grad(
            (head * factors.to(head)).sum(),
            [*outputs.values()],
            retain_graph=True,
            allow_unused=True,
        )
        for head in heads
    ]
    return {
        name: torch.stack([(grad != 0).flatten(0, -2).any(0) for grad in own]).cpu()
        for name, own in zip(outputs, zip(*grads, strict=True), strict=True)
        if all(grad is not None for grad in own)
    }


def _around(attention: Attention, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    dot = f"{attention.around}." if attention.around else ""
    own = {name: y for name, y in outputs.items() if name.startswith(dot)}
    return {name: y for name, y in own.items() if name != attention.output.name}


def _parts_of(layer: nn.Module) -> tuple[Float[Tensor, "out in"], Float[Tensor, " out"] | None]:
    """Views of the weight, its outputs along the first axis, and of the bias."""
    weight: Tensor = layer.get_parameter("weight")
    bias: Tensor | None = getattr(layer, "bias", None)
    return (weight.T if is_transposed(layer) else weight), bias
