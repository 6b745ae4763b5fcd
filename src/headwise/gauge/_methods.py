"""The methods: each gives the importance of every head in every text."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.gauge._replay import Replay
from headwise.gauge._run import Run

# Random directions of `curvature`: 4 already give the order of the exact Jacobian.
_PROBES = 8

Tell = Callable[[int, int], None]
PerHead = Float[Tensor, "M N"]
Gone = Bool[Tensor, " N"]


class Method(Protocol):
    """How important every head is in every text, when some heads are gone already."""

    def __call__(self, run: Run, gone: Gone, tell: Tell) -> PerHead: ...


def gradient(run: Run, gone: Gone, tell: Tell) -> PerHead:
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


def half_gate(run: Run, gone: Gone, tell: Tell) -> PerHead:
    """|∂loss/∂gate| of each text where all gates are ½, so that what heads do together counts."""
    return _gradients(run, (~gone).double() / 2, tell)


def curvature(run: Run, gone: Gone, tell: Tell) -> PerHead:
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


def ablation(run: Run, gone: Gone, tell: Tell) -> PerHead:
    """What the loss of each text grows by when a head gives its mean over all texts instead."""
    return _left_out(run, gone, mean=True, tell=tell)


def zero_ablation(run: Run, gone: Gone, tell: Tell) -> PerHead:
    """What the loss of each text grows by when a head gives nothing."""
    return _left_out(run, gone, mean=False, tell=tell)


METHODS: Mapping[str, Method] = {
    "half-gate": half_gate,
    "gradient": gradient,
    "curvature": curvature,
    "ablation": ablation,
    "zero-ablation": zero_ablation,
}


def _gradients(run: Run, start: Float[Tensor, " N"], tell: Tell) -> PerHead:
    """One backward pass of a batch gives all: each text has gates of its own."""
    found = []
    for at in range(len(run.batches)):
        gates = run.open_gates(at, start)
        losses = run.losses(at, gates)
        found.append(torch.autograd.grad(losses.sum(), gates)[0].abs())
        tell(at + 1, len(run.batches))
    return torch.cat(found)


@torch.no_grad()
def _left_out(run: Run, gone: Gone, *, mean: bool, tell: Tell) -> PerHead:
    start = (~gone).double()
    left = torch.nonzero(~gone).flatten().tolist()
    owner = [attention for attention in run.attentions for _ in attention.site.heads()]
    found = []
    for at in range(len(run.batches)):
        replay = Replay(run.model, run.attentions)
        with replay.recording():
            output = run.output(at, start, mean)
        before = run.judge(at, output)
        with replay.before(owner[-1]):
            if not torch.equal(run.losses(at, start, mean), before):
                replay.forget()  # a model that blocks alone do not explain is run as a whole
        grown = before.new_zeros(len(before), len(start))
        for done, head in enumerate(left, 1):
            gates = start.clone()
            gates[head] = 0
            with replay.before(owner[head]):
                grown[:, head] = run.losses(at, gates, mean) - before
            tell(at * len(left) + done, len(left) * len(run.batches))
        found.append(grown)
    return torch.cat(found)
