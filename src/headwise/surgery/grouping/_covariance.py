"""The covariance of the inputs of the linear layers around attentions, over some texts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.models import (
    InputTracker,
    hooked,
)
from headwise.models.ownership import (
    Attention,
    call_model,
    edit_heads,
)
from headwise.surgery.grouping._rows import Layout

# Every direction gets a little weight, since no sample of texts covers all inputs.
_RIDGE = 1e-3


@torch.no_grad()
def covariance_factors(
    model: nn.Module, layouts: Mapping[Attention, Layout], batches: list[Any]
) -> dict[str, Float[Tensor, "m m"]]:
    """Return a Cholesky factor of the second moments of each layer's input.

    A constant 1 is appended to the input, for the bias. Padding tokens are left out. Without
    batches there are no factors, which stands for isotropic inputs.
    """
    moments: dict[str, Tensor] = {}
    with in_evaluation(model), edit_heads(model, [*layouts], lambda _, heads: heads) as inputs:
        hooks = [
            (model.get_submodule(name), partial(_add, moments, name, inputs, attention.site.stack))
            for attention, layout in layouts.items()
            for name in {rows.name for rows in (layout.q, layout.k, layout.v)}
        ]
        with hooked(before=hooks):
            for batch in batches:
                call_model(model, batch)
    return {name: _factor(moment) for name, moment in moments.items()}


def _add(
    moments: dict[str, Tensor], name: str, inputs: InputTracker, stack: str, _: nn.Module, args: Any
) -> None:
    x = args[0].detach()
    real = inputs.of(stack).text.real
    x = x[real.to(x.device)] if real is not None and real.shape == x.shape[:2] else x
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, -2).double()
    moments[name] = moments.get(name, 0) + x.T @ x


def _factor(moment: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    ridge = _RIDGE * moment.diagonal().mean()
    return torch.linalg.cholesky(moment + ridge * torch.eye(len(moment)).to(moment))
