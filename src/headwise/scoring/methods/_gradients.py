"""Methods that follow slopes: one backward pass gives every head of every text."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.scoring._gated_model import GatedModel
from headwise.scoring.methods._method import Gone, PerHead, Tell

# Random directions of `curvature`: 4 already give the order of the exact Jacobian.
_PROBES = 8


def gradient(run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
    """|∂loss/∂gate| of each text at the full model.

    Raises:
        ArgumentError: the loss compares with the full model, where it is flat.

    Source: Michel et al. 2019, eq. 2, without its normalisation of each layer.
    """
    if run.loss.compares and not gone.any():
        raise ArgumentError(
            f"importance: the loss {run.loss.name!r} is least at the full model, so its gradient "
            f"is 0 there. Give method='half-gate' or 'curvature', or another loss=."
        )
    return _gradients(run, (~gone).double(), tell)


def half_gate(run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
    """|∂loss/∂gate| of each text where all gates are ½, so that what heads do together counts."""
    return _gradients(run, (~gone).double() / 2, tell)


def curvature(run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
    """½‖∂u/∂gate‖², `u` the embedding of a text: what 1 − cosine grows by, to second order.

    Random directions stand for the coordinates of `u`: the mean of (r · ∂u/∂gate)² over normal
    `r` is the squared norm.

    Raises:
        ArgumentError: the loss is not one of embeddings.
    """
    if not run.loss.compares:
        raise ArgumentError(
            f"importance: method='curvature' follows embeddings, the loss is {run.loss.name!r}. "
            f"Give loss='embedding', or method='half-gate'."
        )
    rng = torch.Generator().manual_seed(0)
    found = []
    for at, batch in enumerate(run.batches):
        gates = run.open_gates(at, (~gone).double())
        embeddings = run.loss.of(run.output(at, gates), batch)
        total = torch.zeros_like(gates)
        for _ in range(_PROBES):
            probe = torch.randn(embeddings.shape, generator=rng, dtype=torch.float64)
            along = (embeddings * probe.to(embeddings)).sum()
            total += torch.autograd.grad(along, gates, retain_graph=True)[0].square()
        found.append(total / (2 * _PROBES))
        tell(at + 1, len(run.batches))
    return torch.cat(found)


def _gradients(run: GatedModel, start: Float[Tensor, " N"], tell: Tell) -> PerHead:
    """One backward pass of a batch gives all: each text has gates of its own."""
    found = []
    for at in range(len(run.batches)):
        gates = run.open_gates(at, start)
        losses = run.losses(at, gates)
        found.append(torch.autograd.grad(losses.sum(), gates)[0].abs())
        tell(at + 1, len(run.batches))
    return torch.cat(found)
