"""A method that learns which heads a model needs, its weights frozen."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.scoring._gated_model import GatedModel
from headwise.scoring._loss import texts_in
from headwise.scoring.methods._method import Gone, PerHead, Tell

# The hard-concrete distribution: its temperature, and how far it is stretched beyond 0 and 1
# before it is clipped to them.
_BETA, _LOW, _HIGH = 2 / 3, -0.1, 1.1
# Gates begin nearly open: a chance of 0.97.
_START = 2.0


@dataclass(frozen=True)
class Gates:
    """The method `gates`: gates on all heads are trained, and a penalty closes what it can.

    Each gate is drawn anew for each text from a hard-concrete distribution, which gives exact
    zeros and ones and can be followed by gradients. The loss plus `penalty` times the expected
    number of open gates is made small by Adam; a closed gate gives the head's mean. The weights
    stay as they are.

    The importance of a head is the chance that its gate is open in the end, 0 … 1. A row of the
    scores is a seed, not a text: intervals are over seeds.

    Attributes:
        penalty: What an open gate costs, in units of the loss. None is what a head is worth on
            average: what the loss grows by without any, divided by their number.
        steps: How many batches each training reads.
        seeds: How often the gates are trained.
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

    def __call__(self, run: GatedModel, gone: Gone, tell: Tell) -> PerHead:
        """The chance of each gate to be open after training, a row for each seed."""
        penalty = _worth(run, gone) if self.penalty is None else self.penalty
        chances = []
        for seed in range(self.seeds):
            logits = self._trained(run, ~gone, penalty, seed, tell)
            chances.append(open_chance(logits) * ~gone)
        return torch.stack(chances)

    def _trained(
        self, run: GatedModel, left: Gone, penalty: float, seed: int, tell: Tell
    ) -> Tensor:
        """The logit of each gate after training."""
        rng = torch.Generator().manual_seed(seed)
        logits = torch.full((len(left),), _START, dtype=torch.float64, device=left.device)
        optimizer = torch.optim.Adam([logits.requires_grad_()], lr=self.rate)
        turns: list[int] = []
        for step in range(self.steps):
            turns = turns or torch.randperm(len(run.batches), generator=rng).tolist()
            at = turns.pop()
            gates = draw_gates(logits, texts_in(run.batches[at]), rng) * left
            loss = run.losses(at, gates, mean=True).mean()
            loss = loss + penalty * (open_chance(logits) * left).sum()
            # Of the logits alone: the weights are frozen.
            logits.grad = torch.autograd.grad(loss, logits)[0]
            optimizer.step()
            tell(seed * self.steps + step + 1, self.seeds * self.steps)
        return logits.detach()


def draw_gates(
    logits: Float[Tensor, " N"], texts: int, rng: torch.Generator
) -> Float[Tensor, "texts N"]:
    """Gates for each text, drawn from the hard-concrete distribution.

    Source: Louizos et al. 2018, eq. 10 and 11.
    """
    drawn = torch.rand(texts, len(logits), generator=rng, dtype=torch.float64).to(logits.device)
    noise = drawn.logit(eps=1e-12)
    stretched = ((noise + logits) / _BETA).sigmoid() * (_HIGH - _LOW) + _LOW
    return stretched.clamp(0, 1)


def open_chance(logits: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The chance that a gate is not 0.

    Source: Louizos et al. 2018, eq. 12.
    """
    ratio = torch.tensor(-_LOW / _HIGH, dtype=logits.dtype)
    return (logits - _BETA * ratio.log()).sigmoid()


@torch.no_grad()
def _worth(run: GatedModel, gone: Gone) -> float:
    """What a head is worth on average."""
    full, none = (~gone).double(), torch.zeros(len(gone), device=gone.device)
    lost = [
        run.losses(at, none, mean=True) - run.losses(at, full, mean=True)
        for at in range(len(run.batches))
    ]
    worth = torch.cat(lost).mean().item() / len(gone)
    if not worth > 0:
        raise ArgumentError(
            f"importance: the loss {run.loss.name!r} grows by {worth * len(gone):.3g} without any "
            f"head, so no penalty fits it. Give method=Gates(penalty=…)."
        )
    return worth
