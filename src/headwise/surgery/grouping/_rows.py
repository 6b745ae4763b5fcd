"""The rows of linear layers that produce the queries, keys and values of an attention."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import hooked
from headwise.ownership import (
    Attention,
    Parts,
    attached_parts,
    is_linear,
    is_transposed,
    output_dependence,
)

_PART_NAMES = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Which outputs of a linear layer are the features of which head.

    Attributes:
        name: The qualified name of the layer.
        index: The outputs of each head, one for each of its features.
    """

    name: str
    index: Int[Tensor, "n D"]

    def read(self, model: nn.Module) -> Float[Tensor, "n D in_and_bias"]:
        """The weight rows in double precision; the bias, or zeros, as the last column."""
        weight, bias = _weight_and_bias(model.get_submodule(self.name))
        weight = weight.detach().double()
        last = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().double()
        return torch.cat([weight, last[:, None]], 1)[self.index]

    @torch.no_grad()
    def write(self, model: nn.Module, rows: Float[Tensor, "n D in_and_bias"]) -> None:
        """Write rows of the form that `read` returns into a model."""
        weight, bias = _weight_and_bias(model.get_submodule(self.name))
        weight[self.index] = rows[..., :-1].to(weight)
        if bias is not None:
            bias[self.index] = rows[..., -1].to(bias)


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows that produce the queries, keys and values of one attention."""

    q: HeadRows
    k: HeadRows
    v: HeadRows

    @property
    def n_kv_heads(self) -> int:
        return len(self.k.index)


@dataclass(frozen=True, eq=False)
class Trace:
    """The computation of one attention, attached in autograd to the linear layers around it.

    Attributes:
        parts: Its queries, keys and values, head by head.
        outputs: The output of each linear layer by its name, in the order of the calls.
    """

    parts: Parts
    outputs: Mapping[str, Float[Tensor, "B T n"]]


@contextmanager
def traced(
    model: nn.Module, attentions: Sequence[Attention], batch: Any
) -> Iterator[dict[Attention, Trace]]:
    """Run a model once and trace its attentions back to linear layers.

    Args:
        attentions: Where several share a module, only the first of them.
    """
    names = {module: name for name, module in model.named_modules() if is_linear(module)}
    outputs: dict[str, Tensor] = {}

    def record(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs.setdefault(names[module], output)

    first = {attention.module: attention for attention in attentions}
    with (
        hooked(after=[(module, record) for module in names]),
        attached_parts(model, first, batch) as parts,
    ):
        yield {a: Trace(parts[a.module], _outputs_around(a, outputs)) for a in attentions}


def layout_of(attention: Attention, trace: Trace) -> Layout:
    """Find the rows that produce queries, keys and values.

    Raises:
        UnsupportedError: those of a head are not separate outputs of one linear layer.
    """
    return Layout(*(_rows_of(attention, trace, part) for part in _PART_NAMES))


def _rows_of(attention: Attention, trace: Trace, part: str) -> HeadRows:
    site, part_name = attention.site.name, _PART_NAMES[part]
    if part not in trace.parts:
        raise UnsupportedError(
            f"group_heads: the {part_name} of {site} cannot be observed, since its attention is "
            f"implemented by hand. Load the model with attn_implementation='sdpa', or leave its "
            f"heads as they are."
        )
    heads = trace.parts[part]
    dependencies = output_dependence(heads, {name: [x] for name, x in trace.outputs.items()})
    if dependencies:
        name = [*dependencies][-1]  # earlier layers feed the last one
        used = dependencies[name]
        # Keys that a group of queries shares may have been repeated for each of them.
        distinct = [h for h in range(len(used)) if h == 0 or not used[h].equal(used[h - 1])]
        index = [used[h].nonzero().flatten() for h in distinct]
        disjoint = used[distinct].sum(0).max() == 1
        if disjoint and {len(outputs) for outputs in index} == {heads.shape[-1]}:
            return HeadRows(name, torch.stack(index))
    raise UnsupportedError(
        f"group_heads: the {part_name} of the heads of {site} are not separate rows of one linear "
        f"layer, as under a norm over all heads or in latent attention. Leave its heads as they "
        f"are."
    )


def _outputs_around(attention: Attention, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{attention.around}." if attention.around else ""
    return {
        name: output
        for name, output in outputs.items()
        if name.startswith(prefix) and name != attention.output.name
    }


def _weight_and_bias(
    layer: nn.Module,
) -> tuple[Float[Tensor, "out in"], Float[Tensor, " out"] | None]:
    """Views of the weight, with its outputs along the first axis, and of the bias."""
    weight: Tensor = layer.get_parameter("weight")
    bias: Tensor | None = getattr(layer, "bias", None)
    return (weight.T if is_transposed(layer) else weight), bias
