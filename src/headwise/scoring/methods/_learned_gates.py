"""A method that learns which heads a model needs, with its weights frozen."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._progress import Progress
from headwise.errors import ArgumentError
from headwise.scoring._gated_model import GatedModel, HeadMask, PerHead

# The hard-concrete distribution: its temperature, and the interval to which it is stretched
# before it is clipped to 0 … 1.
_BETA, _LOW, _HIGH = 2 / 3, -0.1, 1.1
# Gates start nearly open, with a probability of 0.97.
_START = 2.0


@dataclass(frozen=True)
class Gates:
    """The method `gates`: trains a gate on every head under a penalty on open gates.

    Each gate is drawn independently for each text from a hard-concrete distribution, which yields
    exact zeros and ones and still has gradients. Adam minimizes the loss plus `penalty` times the
    expected number of open gates; a closed gate replaces the head's output by its mean. The
    weights are not trained.

    The importance of a head is the probability that its gate is open after training, 0 … 1. A
    row of the scores is a seed, not a text: intervals are over seeds.

    Attributes:
        penalty: The cost of an open gate, in units of the loss. None is the average worth of a
            head: the increase of the loss without any head, divided by the number of heads.
        steps: The number of batches in each training.
        seeds: The number of trainings.
        rate: The learning rate.
    Raises:
        ArgumentError: one of them is not above 0.

    Source: Louizos et al. 2018, eq. 10 to 12; Voita et al. 2019, section 4, which trains the
    weights too.
    """

    penalty: float | None = None
    steps: int = 300
    seeds: int = 3
    rate: float = 0.05

    def __post_init__(self) -> None:
        for name in ("penalty", "steps", "seeds", "rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"Gates: {name}={value}. Give a number above 0.")

    def __call__(self, gated: GatedModel, removed: HeadMask, on_progress: Progress) -> PerHead:
        """The probability of each gate to be open after training, a row for each seed."""
        penalty = _mean_worth(gated, removed) if self.penalty is None else self.penalty
        probabilities = []
        for seed in range(self.seeds):
            logits = self._trained(gated, ~removed, penalty, seed, on_progress)
            probabilities.append(open_chance(logits) * ~removed)
        return torch.stack(probabilities)

    def _trained(
        self,
        gated: GatedModel,
        remaining: HeadMask,
        penalty: float,
        seed: int,
        on_progress: Progress,
    ) -> Tensor:
        """The logit of each gate after training."""
        rng = torch.Generator().manual_seed(seed)
        logits = torch.full((len(remaining),), _START, dtype=torch.float64, device=remaining.device)
        optimizer = torch.optim.Adam([logits.requires_grad_()], lr=self.rate)
        epoch: list[int] = []
        for step in range(self.steps):
            epoch = epoch or torch.randperm(len(gated.batches), generator=rng).tolist()
            batch = epoch.pop()
            gates = draw_gates(logits, gated.texts(batch), rng) * remaining
            loss = gated.losses(batch, gates, mean=True).mean()
            loss = loss + penalty * (open_chance(logits) * remaining).sum()
            # The gradient of the logits alone: the weights are frozen.
            logits.grad = torch.autograd.grad(loss, logits)[0]
            optimizer.step()
            on_progress(seed * self.steps + step + 1, self.seeds * self.steps)
        return logits.detach()


def draw_gates(
    logits: Float[Tensor, " N"], texts: int, rng: torch.Generator
) -> Float[Tensor, "texts N"]:
    """Draw gates for each text from the hard-concrete distribution.

    Source: Louizos et al. 2018, eq. 10 and 11.
    """
    # The logit of a uniform number has a logistic distribution. Added to the logit of a gate, it
    # makes a draw that is differentiable in the gate, which a Bernoulli draw is not. Stretching
    # reaches beyond 0 and 1 and clipping brings it back, so that exact zeros and ones occur.
    uniform = torch.rand(texts, len(logits), generator=rng, dtype=torch.float64).to(logits.device)
    noise = uniform.logit(eps=1e-12)
    stretched = ((noise + logits) / _BETA).sigmoid() * (_HIGH - _LOW) + _LOW
    return stretched.clamp(0, 1)


def open_chance(logits: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The probability that a gate is not 0.

    Source: Louizos et al. 2018, eq. 12.
    """
    # A gate is above 0 if its draw before stretching is above -LOW / (HIGH - LOW), whose logit is
    # log(-LOW / HIGH).
    ratio = torch.tensor(-_LOW / _HIGH, dtype=logits.dtype)
    return (logits - _BETA * ratio.log()).sigmoid()


@torch.no_grad()
def _mean_worth(gated: GatedModel, removed: HeadMask) -> float:
    """The increase of the loss without any head, divided by the number of heads."""
    open_gates, closed = (~removed).double(), torch.zeros(len(removed), device=removed.device)
    increases = [
        gated.losses(batch, closed, mean=True) - gated.losses(batch, open_gates, mean=True)
        for batch in range(len(gated.batches))
    ]
    worth = torch.cat(increases).mean().item() / len(removed)
    if not worth > 0:
        raise ArgumentError(
            f"importance: the loss {gated.loss.name!r} grows by {worth * len(removed):.3g} without "
            f"any head, so no default penalty fits it. Give method=Gates(penalty=…)."
        )
    return worth
