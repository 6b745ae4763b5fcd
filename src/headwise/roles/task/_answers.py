"""What ablating heads does to the answers of examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise.errors import UnsupportedError
from headwise.models import ablate
from headwise.roles.task._examples import TokenExample
from headwise.roles.task._masses import in_batches, padded
from headwise.tables import Head, bootstrap_means

_RANDOM_SETS = 5
_ENDS = (2.5, 97.5)  # percent: the ends of an interval of 95 %


@dataclass(frozen=True)
class AnswerEffect:
    """How well a model answers held-out examples with and without a set of heads.

    An ablated head outputs its mean over the texts of the examples.

    Attributes:
        n: The number of examples with an answer.
        loss: The mean loss of an answer's tokens, in nats.
        accuracy: The share of answers whose every token is the most likely one.
        loss_without: The loss without the set.
        accuracy_without: The accuracy without the set.
        loss_random: The loss without as many random heads, over several draws.
        accuracy_random: The accuracy without as many random heads.
        ci_low: The lower end of the interval of the loss's growth (95 %, over examples).
        ci_high: The upper end.
    """

    n: int
    loss: float
    accuracy: float
    loss_without: float
    accuracy_without: float
    loss_random: float
    accuracy_random: float
    ci_low: float
    ci_high: float

    def __str__(self) -> str:
        return (
            f"without these heads the loss of {self.n} answers grows by "
            f"{self.loss_without - self.loss:.3f} nats [{self.ci_low:.3f}, {self.ci_high:.3f}] "
            f"({self.loss_random - self.loss:.3f} without as many random heads), and "
            f"{self.accuracy_without:.0%} are right instead of {self.accuracy:.0%} "
            f"({self.accuracy_random:.0%})"
        )


def answer_effect(
    model: nn.Module,
    examples: Sequence[TokenExample],
    heads: Sequence[Head],
    known: Sequence[Head],
    seed: int,
) -> AnswerEffect | None:
    """The effect of ablating some heads on answers; None if no example has one.

    Args:
        known: All heads, which random ones are drawn from.
    Raises:
        UnsupportedError: the model gives no logits of tokens.
    """
    answered = [example for example in examples if example.answer]
    if not answered:
        return None
    batches = [[answered[row] for row in rows] for rows in in_batches(answered)]
    reference = [vars(padded(batch, model, answers=True)) for batch in batches]

    def without(removed: Sequence[Head]) -> Float[np.ndarray, "2 n"]:
        with ablate(model, list(removed), mode="mean", reference=reference):
            return _answers(model, batches)

    rng = np.random.default_rng(seed)
    with in_evaluation(model):
        whole, ablated = _answers(model, batches), without(heads)
        draws = [rng.permutation(len(known))[: len(heads)] for _ in range(_RANDOM_SETS)]
        random = np.mean([without([known[head] for head in draw]) for draw in draws], axis=0)
    growth = bootstrap_means((ablated[0] - whole[0])[:, None], seed=seed)
    low, high = np.percentile(growth, _ENDS)
    means = {
        f"{name}{ending}": float(mean)
        for ending, result in (("", whole), ("_without", ablated), ("_random", random))
        for name, mean in zip(("loss", "accuracy"), result.mean(-1), strict=True)
    }
    return AnswerEffect(n=len(answered), ci_low=float(low), ci_high=float(high), **means)


@torch.no_grad()
def _answers(
    model: nn.Module, batches: Sequence[Sequence[TokenExample]]
) -> Float[np.ndarray, "2 n"]:
    """The loss of each answer, and whether it is right."""
    return np.array([row for batch in batches for row in _of_batch(model, batch)]).T


def _of_batch(model: nn.Module, batch: Sequence[TokenExample]) -> Iterator[tuple[float, float]]:
    output = model(**vars(padded(batch, model, answers=True)))
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise UnsupportedError(
            f"find_heads: {type(model).__name__} gives no logits of tokens, so the effect on "
            f"answers is unknown. Give examples without answer=, or the model with its head."
        )
    for row, example in zip(logits, batch, strict=True):
        start, n = len(example.ids), len(example.answer)
        answer = torch.tensor(example.answer, device=row.device)
        predicted = row[start - 1 : start - 1 + n]
        loss = nn.functional.cross_entropy(predicted.double(), answer)
        yield loss.item(), float((predicted.argmax(-1) == answer).all())
