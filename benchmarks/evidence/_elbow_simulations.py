"""Elbows of simulated models: how often their intervals hold the number that was to be expected.

A model is drawn anew in each simulation. In each text a head moves an embedding by a vector, and
removing heads costs half the squared length of the sum of their vectors. So what any set of heads
costs in the mean over all texts of the kind is known exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.tables import Curves, Head, Scores

HEADS = tuple(Head("", layer, head) for layer in range(6) for head in range(12))
ALLOWED = 0.01  # growth of the mean loss
POINTS = np.arange(31)  # numbers of removed heads
WIDTH = 8  # of the embedding
SPREAD = 0.7  # of the logarithm of the factors on the losses of a text, and of a head in a text
FRESH = 100  # scorings of other texts, whose median elbow is the number to expect
DRAWS = 10  # of these, evaluated on other texts too

FIXED, REDRAWN = "order", "redrawn"


@dataclass(frozen=True)
class Kind:
    """How the losses of heads add up.

    Attributes:
        shared: The share of a direction that the vectors of all heads have in a text; 0 if losses
            are additive in the mean.
        noise: The standard deviation of a text's growth without a head, in units of `ALLOWED`,
            that comes on top: with a language model some texts gain.
    """

    shared: float = 0.0
    noise: float = 0.0


KINDS = {
    "they add up": Kind(),
    "twelve heads cost a third more than their sum": Kind(shared=0.03),
    "they add up; texts gain or lose 0.01 by each head": Kind(noise=1.0),
}


@dataclass(frozen=True)
class SimulatedModel:
    """A model whose heads have these mean losses alone."""

    kind: Kind
    alone: np.ndarray

    def vectors(self, texts: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """How each head moves each text, `[texts, heads, WIDTH]`, and the noise of its loss."""
        own = rng.standard_normal((texts, len(HEADS), WIDTH))
        common = rng.standard_normal((texts, 1, WIDTH))
        direction = np.sqrt(1 - self.kind.shared) * own + np.sqrt(self.kind.shared) * common
        of_text, of_head = (
            rng.lognormal(-(SPREAD**2) / 2, SPREAD, (texts, heads)) for heads in (1, len(HEADS))
        )
        length = np.sqrt(2 * of_text * of_head * self.alone / WIDTH)
        noise = rng.standard_t(4, (texts, len(HEADS))) / np.sqrt(2)
        return length[..., None] * direction, self.kind.noise * ALLOWED * noise

    def scores(self, texts: int, rng: np.random.Generator) -> Scores:
        """What each text loses without each head."""
        vectors, noise = self.vectors(texts, rng)
        lost = (vectors**2).sum(-1) / 2 + noise
        return Scores(HEADS, np.arange(len(HEADS)), lost, method="ablation", loss="simulated")

    def curve(self, order: list[Head], drawn: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """The loss of each text at each point, `[K, texts]`."""
        rows = [HEADS.index(head) for head in order[: POINTS[-1]]]
        vectors, noise = (values[:, rows] for values in drawn)
        lost = (vectors.cumsum(1) ** 2).sum(-1) / 2 + noise.cumsum(1)
        return np.concatenate([np.zeros((1, len(lost))), lost.T])

    def elbow(self, order: list[Head]) -> int:
        """The elbow of an order in the mean over all texts of the kind."""
        rows = [HEADS.index(head) for head in order[: POINTS[-1]]]
        alone, length = self.alone[rows], np.sqrt(self.alone[rows])
        added = alone + 2 * self.kind.shared * length * (length.cumsum() - length)
        return int((added.cumsum() < ALLOWED).sum())


def new_model(kind: Kind, rng: np.random.Generator) -> SimulatedModel:
    """Losses of single heads that rise about as those of MiniLM do."""
    rising = 0.0005 * (1 + (np.arange(len(HEADS)) / 14) ** 2)
    return SimulatedModel(kind, rng.permutation(rising * rng.lognormal(0, 0.3, len(HEADS))))


@dataclass(frozen=True)
class Outcome:
    """An interval of an elbow, beside what it should hold."""

    stated: int
    low: float
    high: float
    expected: float
    draws: np.ndarray

    def holds(self) -> bool:
        return self.low <= self.expected <= self.high

    def inside(self) -> float:
        """The share of independent draws of scored and evaluated texts that it holds."""
        return float(((self.low <= self.draws) & (self.draws <= self.high)).mean())


def elbows_of(
    kind: Kind, scored: int, evaluated: tuple[int, ...], seed: int, orders: int = 10
) -> Iterator[dict[str, Outcome]]:
    """The intervals of an order, and of redrawn ones, for each number of evaluated texts.

    An order is expected to have the elbow that it has over all texts of the kind; orders of other
    scored texts are expected to have the median of theirs.
    """
    rng = np.random.default_rng(seed)
    model = new_model(kind, rng)
    scores = model.scores(scored, rng)
    names = {FIXED: [scores.order()], REDRAWN: scores.redrawn_orders(orders, seed)}
    fresh = [model.scores(scored, rng).order() for _ in range(FRESH)]
    expected = {
        FIXED: model.elbow(names[FIXED][0]),
        REDRAWN: float(np.median([model.elbow(order) for order in fresh])),
    }
    texts = model.vectors(max(evaluated), rng)
    lost = {name: [model.curve(order, texts) for order in of] for name, of in names.items()}
    for number in evaluated:
        per_text = {name: np.stack(of)[..., :number] for name, of in lost.items()}
        curves = Curves(POINTS, len(HEADS), per_text, "simulated", compares=True)
        draws = np.array([elbow_of_draw(model, order, number, rng) for order in fresh[:DRAWS]])
        outcomes = {}
        for name in names:
            elbow = curves.elbow(name, ALLOWED)
            outcomes[name] = Outcome(elbow.heads, elbow.low, elbow.high, expected[name], draws)
        yield outcomes


def elbow_of_draw(
    model: SimulatedModel, order: list[Head], texts: int, rng: np.random.Generator
) -> int:
    # An elbow is that of the mean over texts; of one text it has no resamples to draw.
    mean = model.curve(order, model.vectors(texts, rng)).mean(-1)
    curves = Curves(POINTS, len(HEADS), {FIXED: mean[None, :, None]}, compares=True)
    return curves.elbow(FIXED, ALLOWED).heads


def coverage(
    kind: Kind, scored: int, evaluated: tuple[int, ...], repeats: int
) -> list[dict[str, Any]]:
    """The coverage of both intervals for each number of evaluated texts."""
    runs = [list(elbows_of(kind, scored, evaluated, seed)) for seed in range(repeats)]
    found = []
    for column in zip(*runs, strict=True):
        for name in (FIXED, REDRAWN):
            outcomes = [outcomes[name] for outcomes in column]
            found.append({
                "interval": name,
                "holds": float(np.mean([outcome.holds() for outcome in outcomes])),
                "inside": float(np.mean([outcome.inside() for outcome in outcomes])),
                "below": float(np.mean([outcome.high < outcome.expected for outcome in outcomes])),
                "above": float(np.mean([outcome.low > outcome.expected for outcome in outcomes])),
                "width": float(np.median([outcome.high - outcome.low for outcome in outcomes])),
                "stated": float(np.mean([outcome.stated for outcome in outcomes])),
                "expected": float(np.mean([outcome.expected for outcome in outcomes])),
            })  # fmt: skip
    return found
