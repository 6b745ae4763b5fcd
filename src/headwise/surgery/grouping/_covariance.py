"""How what comes into the linear layers of attentions varies over some texts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.models import Attention, InputTracker, call_model, edit_heads, hooked, in_evaluation
from headwise.surgery.grouping._rows import Layout

# Beside what was seen, every direction counts a little: texts are never all there is.
_UNSEEN = 1e-3


@torch.no_grad()
def input_roots(
    model: nn.Module, layouts: Mapping[Attention, Layout], batches: list[Any]
) -> dict[str, Float[Tensor, "m m"]]:
    """A root of the second moments of what each layer is given, and a 1 for its bias.

    Padding is no token. Without batches what comes in is taken to be alike in all directions.
    """
    moments: dict[str, Tensor] = {}
    with in_evaluation(model), edit_heads(model, [*layouts], lambda _, heads: heads) as inputs:
        notes = [
            (model.get_submodule(name), partial(_note, moments, name, inputs, attention.site.stack))
            for attention, layout in layouts.items()
            for name in {rows.name for rows in (layout.q, layout.k, layout.v)}
        ]
        with hooked(before=notes):
            for batch in batches:
                call_model(model, batch)
    return {name: _root(moment) for name, moment in moments.items()}


def _note(
    moments: dict[str, Tensor], name: str, inputs: InputTracker, stack: str, _: nn.Module, args: Any
) -> None:
    x = args[0].detach()
    real = inputs.of(stack).text.real
    x = x[real.to(x.device)] if real is not None and real.shape == x.shape[:2] else x
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, -2).double()
    moments[name] = moments.get(name, 0) + x.T @ x


def _root(moment: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    little = _UNSEEN * moment.diagonal().mean()
    return torch.linalg.cholesky(moment + little * torch.eye(len(moment)).to(moment))
