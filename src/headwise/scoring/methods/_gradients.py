"""Methods that use gradients: one backward pass scores every head in every text."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._progress import Progress
from headwise.errors import ArgumentError, UnsupportedError
from headwise.scoring._gated_model import GatedModel
from headwise.scoring.methods._method import HeadMask, PerHead

# Random directions of `curvature`: 4 already give the order of the exact Jacobian.
_PROBES = 8


def gradient(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """|∂loss/∂gate| of each text at the full model.

    Raises:
        ArgumentError: the loss compares with the full model, where its gradient is zero.

    Source: Michel et al. 2019, eq. 2, without its normalisation of each layer.
    """
    if gated.loss.compares and not removed.any():
        raise ArgumentError(
            f"importance: the loss {gated.loss.name!r} is least at the full model, so its gradient "
            f"is 0 there. Give method='half-gate' or method='curvature', or another loss=."
        )
    return _gradients(gated, (~removed).double(), on_progress)


def half_gate(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """|∂loss/∂gate| of each text where all gates are ½, which accounts for joint effects."""
    return _gradients(gated, (~removed).double() / 2, on_progress)


def curvature(gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
    """½‖∂u/∂gate‖², `u` the embedding of a text: the second-order increase of 1 − cosine.

    Random directions replace the coordinates of `u`: the mean of (r · ∂u/∂gate)² over normal
    `r` is the squared norm.

    Raises:
        ArgumentError: the loss does not compare embeddings.
    """
    if not gated.loss.compares:
        raise ArgumentError(
            f"importance: method='curvature' needs a loss of embeddings, the loss is "
            f"{gated.loss.name!r}. Give loss='embedding', or method='half-gate'."
        )
    rng = torch.Generator().manual_seed(0)
    curvatures = []
    for index, batch in enumerate(gated.batches):
        gates = gated.trainable_gates(index, (~removed).double())
        embeddings = gated.loss.of(gated.output(index, gates), batch)
        total = torch.zeros_like(gates)
        for _ in range(_PROBES):
            probe = torch.randn(embeddings.shape, generator=rng, dtype=torch.float64)
            projection = (embeddings * probe.to(embeddings)).sum()
            total += _gradient(projection, gates, retain_graph=True).square()
        curvatures.append(total / (2 * _PROBES))
        on_progress(index + 1, len(gated.batches))
    return torch.cat(curvatures)


def _gradients(gated: GatedModel, start: Float[Tensor, " N"], on_progress: Progress) -> PerHead:
    """One backward pass per batch scores all texts, since each text has gates of its own."""
    if gated.by_length is not None:
        gated, places = gated.by_length
        rows = _gradients_of_batches(gated, start, on_progress)
        return torch.empty_like(rows).index_copy_(0, torch.tensor(places, device=rows.device), rows)
    return _gradients_of_batches(gated, start, on_progress)


def _gradients_of_batches(
    gated: GatedModel, start: Float[Tensor, " N"], on_progress: Progress
) -> PerHead:
    gradients = []
    for index in range(len(gated.batches)):
        gates = gated.trainable_gates(index, start)
        losses = gated.losses(index, gates)
        gradients.append(_gradient(losses.sum(), gates).abs())
        on_progress(index + 1, len(gated.batches))
    return torch.cat(gradients)


def _gradient(loss: Tensor, gates: Tensor, retain_graph: bool = False) -> Tensor:
    """The gradient of a number with respect to the gates.

    Raises:
        UnsupportedError: none reaches the gates of any head.
    """
    try:
        return torch.autograd.grad(loss, gates, retain_graph=retain_graph)[0]
    except RuntimeError as error:
        if "does not require grad" not in str(error) and "have been used in the graph" not in str(
            error
        ):
            raise
        raise UnsupportedError(
            "importance: no gradient of the loss reaches the gates of the heads, as behind weights "
            "that are packed by quantisation or in a pass under torch.no_grad(). Give "
            "method='ablation'."
        ) from error
