"""Data with a known answer: how often the test of roles errs and finds; coverage of intervals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.roles import step_down
from headwise.roles.evidence._hypotheses import Hypotheses, has_role, run_tests
from headwise.roles.examples._task_heads import task_hypotheses
from headwise.roles.examples._task_scores import TokenExample
from headwise.roles.relations import Role
from headwise.tables import halves, ratio_interval

ROLE = Role("simulated", "", lambda text: (), "word", bar=0.1, points=0.1)
HEADS = 300

Gains = tuple[np.ndarray, np.ndarray]  # the gains of texts, and the worst possible gain


def symmetric(rng: np.random.Generator, texts: int) -> Gains:
    length = rng.integers(1, 30, (texts, 1))
    shared = 0.5 * rng.standard_normal((texts, 1))
    return length * (shared + rng.standard_t(4, (texts, 100))), np.full(100, -np.nan)


def rarely_much_worse(rng: np.random.Generator, texts: int) -> Gains:
    count = rng.integers(1, 30, (texts, 1))
    gains = np.where(rng.random((texts, 100)) < 0.1, -0.9, 0.1)
    return count * gains, np.full(100, -count.mean())


def very_rarely_much_worse(rng: np.random.Generator, texts: int) -> Gains:
    gains = np.where(rng.random((texts, 100)) < 0.05, -0.95, 0.05)
    return gains, np.full(100, -1.0)


def rarely_much_better(rng: np.random.Generator, texts: int) -> Gains:
    count = rng.integers(1, 30, (texts, 1))
    return -count * np.where(rng.random((texts, 100)) < 0.1, -0.9, 0.1), np.full(100, -count.mean())


GAINS: dict[str, Callable[[np.random.Generator, int], Gains]] = {
    "symmetric, heavy tails": symmetric,
    "−0.9 in one text of 10, else +0.1": rarely_much_worse,
    "−0.95 in one text of 20, else +0.05": very_rarely_much_worse,
    "+0.9 in one text of 10, else −0.1": rarely_much_better,
}


def false_discoveries(
    draw: Callable[[np.random.Generator, int], Gains], texts: int, repeats: int
) -> tuple[float, float]:
    signs, ours = 0, 0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        gains, worst = draw(rng, texts)
        gains = gains.astype(np.float32)
        scaled = gains / np.sqrt((gains**2).sum(0))
        flipped = rng.choice(np.array([-1, 1], np.float32), (600, texts)) @ scaled
        signs += scaled.sum(0).max() > np.quantile(flipped.max(1), 0.95)
        bounds = None if np.isnan(worst).any() else [worst]
        ours += step_down([gains], bounds, draws=600, seed=seed)[0].min() <= 0.05
    return signs / repeats, ours / repeats


def hits(rng: np.random.Generator, texts: int, rate: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Hits of texts that differ in length and in their own rates."""
    count = rng.integers(1, 25, (texts, 1)).astype(float)
    rates = rng.beta(6 * rate, 6 * (1 - rate), (texts, 1))
    return rng.binomial(count.astype(int), rates).astype(float), count, rate


def importances(rng: np.random.Generator, texts: int) -> tuple[np.ndarray, np.ndarray, float]:
    return rng.lognormal(0, 1, (texts, 1)), np.ones((texts, 1)), float(np.exp(0.5))


def covered(draw: Callable[..., Any], texts: int, repeats: int) -> float:
    """How often the 95 % interval holds the truth."""
    inside = 0
    for seed in range(5 * repeats):
        value, count, truth = draw(np.random.default_rng(seed), texts)
        low, high = ratio_interval(value, count, seed=seed)
        inside += bool(low[0] <= truth <= high[0])
    return inside / (5 * repeats)


def outcomes(better: float, texts: int, repeats: int) -> tuple[float, float, float]:
    """How often the better head gets a label; if all were tested; how often another gets p ≤ .05.

    A rule is right for half of the queries, one per text. One head is `better` than the rule by
    so much; 100 are as good as it by chance; the others differ from it in a single text.
    """
    counts = np.zeros(3)
    for seed in range(repeats):
        family = simulated_family(np.random.default_rng(seed), texts, better)
        everything = replace(family, measures={"chosen_half": family.measures["chosen_half"]})
        (chosen,), (whole,) = (
            run_tests([tested], draws=600, seed=seed, intervals=False)
            for tested in (family, everything)
        )
        wrong = (chosen["p_adj"][1:] <= 0.05).any()
        counts += [has_role(family, chosen)[0], has_role(family, whole)[0], wrong]
    found, found_of_all, wrongly = counts / repeats
    return found, found_of_all, wrongly


def simulated_family(rng: np.random.Generator, texts: int, better: float) -> Hypotheses:
    """A head that is better than the rule, heads that are as good, and heads that equal it."""
    rates = np.full(HEADS, 0.5)
    rates[0] += better
    rule = np.repeat(rng.random((texts, 1)) < 0.5, HEADS, 1).astype(np.float32)
    value = (rng.random((texts, HEADS)) < rates).astype(np.float32)
    value[:, 101:] = rule[:, 101:]
    value[rng.integers(texts), 101:] = 0
    shown = rng.binomial(texts, rates) / texts
    shown[101:] = 0.5
    measures = {"chosen_half": shown[None], "chosen_baseline": np.full((1, HEADS), 0.5)}
    names, value, rule = {"rule": ["rule"]}, value[:, None], rule[:, None]
    return Hypotheses(value, np.ones_like(value), {"rule": rule}, (ROLE,), names, measures)


TASK_HEADS, TASK_BIAS, ALIKE = 72, 0.5, 40


def task_outcomes(
    examples: int, candidates: int, others: str, planted: float | None, repeats: int
) -> tuple[float, float, float]:
    """How often `find_heads` finds the planted head; if all were tested; how often any other.

    The whole procedure on simulated masses: halves, set, strongest baselines, screen, test, bars.

    Args:
        others: What 40 of the other 71 heads do, the rest being noise: `noise`; `place` (they
            attend to the first candidate); `rule` (the first candidate is right half of the time,
            and so are they, in other examples). Each of the 40 differs in one example.
        planted: How often the first head is right; None plants nothing, and its place counts as
            another head.
    """
    counts = np.zeros(3)
    for seed in range(repeats):
        rng = np.random.default_rng([seed, examples, candidates])
        family = simulated_task(rng, examples, candidates, others, planted)
        everything = replace(family, measures={"chosen_half": family.measures["chosen_half"]})
        chosen, whole = (
            has_role(each, run_tests([each], draws=1000, seed=seed, intervals=False)[0])
            for each in (family, everything)
        )
        wrong = chosen if planted is None else chosen[1:-1]  # the set follows the planted head
        counts += [chosen[0], whole[0], wrong.any()]
    found, found_of_all, wrongly = counts / repeats
    return found, found_of_all, wrongly


def simulated_task(
    rng: np.random.Generator, examples: int, candidates: int, others: str, planted: float | None
) -> Hypotheses:
    """A simulated model, exchanged stretches and six null models."""
    places = rng.permuted(np.tile(np.arange(candidates), (examples, 1)), axis=1)
    if others == "rule":  # stretches are listed with the right one first
        swapped = np.flatnonzero(
            rng.random(examples) < (TASK_BIAS * candidates - 1) / (candidates - 1)
        )
        first = places[swapped].argmin(1)
        places[swapped, first] = places[swapped, 0]
        places[swapped, 0] = 0
    query = ((2 * candidates, 2 * candidates + 1),)
    read = [
        TokenExample(
            (0,) * query[0][1], query, tuple((2 * k, 2 * k + 2) for k in row.tolist()), 1, ()
        )
        for row in places
    ]
    nulls = [("exchanged", _task_masses(rng, places, others if others == "place" else "noise"))]
    nulls += [
        (name, _task_masses(rng, places, "noise"))
        for name in ("permuted", "random")
        for _ in range(3)
    ]
    masses = _task_masses(rng, places, others, planted)
    seed = int(rng.integers(1 << 30))
    return task_hypotheses(read, masses, nulls, halves(examples, seed), seed, None)[0]


def _task_masses(
    rng: np.random.Generator, places: np.ndarray, others: str, planted: float | None = None
) -> np.ndarray:
    n, K = places.shape
    mass = rng.random((n, K, TASK_HEADS))
    if planted is not None:
        chosen = np.where(rng.random(n) < planted, 0, rng.integers(1, K, n))
        mass[np.arange(n), chosen, 0] += 1
    if others != "noise":
        alike = places.argmin(1)
        if others == "rule":
            alike = np.where(rng.random(n) < TASK_BIAS, 0, rng.integers(1, K, n))
        for head in range(1, 1 + ALIKE):
            chosen, away = alike.copy(), rng.integers(n)
            chosen[away] = (chosen[away] + 1) % K
            mass[np.arange(n), chosen, head] += 1
    return mass
