"""The decisions of a model and of its baselines on the same examples, and their evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from torch import nn

from headwise._display import counted
from headwise._progress import Passes, Progress
from headwise.roles.relations import Role
from headwise.roles.results import outcomes
from headwise.roles.task._examples import TokenExample
from headwise.roles.task._masses import POSITIONS, Masses, chance, masses_of, positional_hits
from headwise.roles.task._table import NULLS
from headwise.roles.testing import (
    FEWEST_TEXTS,
    Evidence,
    Family,
    Verdict,
    halves,
    has_role,
    why_not,
)

_TASK = Role("task", "", lambda text: ())  # for its bars, which are those of roles
LARGEST_SET = 0.05  # of all heads
# How a baseline is named in the table.
_NULL_NAMES = {
    "chance": "chance",
    "permuted": "a head with permuted weights",
    "random": "a head that learned nothing",
    "shuffled": "the same stretches with their tokens exchanged",
    "heads": "random heads",
}


@dataclass(frozen=True)
class TaskTrial:
    """The masses of a model and of its baselines on the same examples.

    Attributes:
        selection: The examples of the selection half.
        chosen: The heads of the set.
        nulls: For each baseline, how often it decides each example correctly, where each head and,
            last, the set are compared with it.
    """

    masses: Masses
    selection: Bool[np.ndarray, " M"]
    chosen: Sequence[int]
    nulls: Mapping[str, Float[np.ndarray, "M C"]]
    null_names: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        examples: Sequence[TokenExample],
        evidence: Evidence,
        most: int | None,
        on_progress: Progress | None,
    ) -> "TaskTrial":
        shuffles = evidence.wants("shuffled")
        passes = Passes(on_progress, len(examples) * (1 + shuffles + evidence.n_models))
        masses = masses_of(model, examples, passes)
        others = []
        if shuffles:
            rng = np.random.default_rng(evidence.seed)
            dealt = [example.shuffled(rng) for example in examples]
            others.append(("shuffled", masses_of(model, dealt, passes)))
        for name, null_model in evidence.models_like(model):
            others.append((name, masses_of(null_model, examples, passes)))
        return cls.of_masses(examples, masses, others, evidence.seed, most)

    @classmethod
    def of_masses(
        cls,
        examples: Sequence[TokenExample],
        masses: Masses,
        others: Sequence[tuple[str, Masses]],
        seed: int,
        most: int | None,
    ) -> "TaskTrial":
        """Choose the set and the strongest baselines on the selection half.

        Args:
            others: The masses of the shuffled examples and of null models, by the name of the null.
        """
        selection = halves(len(examples), seed)
        N = len(masses.heads)
        size = most or ceil(LARGEST_SET * N)
        chosen = masses.best_set(selection, size)
        by_position = positional_hits(examples)
        rule = int(by_position[selection].mean(0).argmax())
        nulls = {
            "chance": _columns(chance(examples), N),
            "position": _columns(by_position[:, rule], N),
            "heads": np.column_stack(
                [
                    _columns(masses.hits().mean(-1), N)[:, :-1],
                    masses.random_sets(len(chosen), seed),
                ]
            ),
        }
        for name, null in others:
            shuffled = name == "shuffled"  # the same heads; a null model gives its best one
            hits = _with_set(null, chosen) if shuffled else _best(null, selection, size)
            nulls[name] = _stronger(nulls.get(name), hits, selection)
        names = _NULL_NAMES | {"position": POSITIONS[rule]}
        return cls(masses, selection, chosen, nulls, names)

    def family(self) -> Family:
        """The hypotheses on the held-out examples: every head, and the set."""
        hits, held = _with_set(self.masses, self.chosen), ~self.selection
        missing = np.full(hits.shape, np.nan)
        nulls = {name: self.nulls.get(name, missing)[held] for name in NULLS}
        measures = {
            "chosen_half": hits[self.selection].mean(0),
            "chosen_baseline": np.max(
                [null[self.selection].mean(0) for null in self.nulls.values()], axis=0
            ),
        }
        return Family(hits[held], np.ones_like(hits[held]), nulls, (_TASK,), measures=measures)

    def frame(self, family: Family, verdict: Verdict) -> pd.DataFrame:
        """A row per head, and a last one for the set."""
        found = has_role(family, verdict)
        heads, held = self.masses.heads, ~self.selection
        margins = np.column_stack(
            [self.masses.margins(), self.masses.margins(self.masses.of_set(self.chosen))]
        )
        null = [NULLS[row] if row >= 0 else "" for row in verdict.null.tolist()]
        columns: dict[str, Any] = {
            "name": [*map(str, heads), ""],
            "stack": [*(head.stack for head in heads), ""],
            "layer": [*(head.layer for head in heads), -1],
            "head": [*(head.head for head in heads), -1],
            "in_set": [*(head in self.chosen for head in range(len(heads))), True],
            "found": found,
            "outcome": outcomes(found, verdict.p, verdict.texts, np.zeros(len(found), dtype=bool)),
            "why": why_not(family, verdict),
            "effect": verdict.effect,
            "null": [self.null_names.get(name, "") for name in null],
            "baseline": verdict.baseline,
            "lift": verdict.lift,
            "ci_low": verdict.low,
            "ci_high": verdict.high,
            "p_adj": verdict.p,
            "contrast": margins[held].mean(0),
            "n": verdict.n,
            "chosen_half": family.measures["chosen_half"],
        }
        columns |= {f"null.{name}": rates for name, rates in zip(NULLS, verdict.rates, strict=True)}
        return pd.DataFrame(columns)

    def notes(self) -> tuple[str, ...]:
        selected, held = int(self.selection.sum()), int((~self.selection).sum())
        notes = [
            f"{counted(selected + held, 'example')}: the set and the strongest baselines chosen on "
            f"{selected}, all numbers from the other {held}",
        ]
        if held < FEWEST_TEXTS:
            notes.append(
                f"no head was tested: {counted(held, 'held-out example')}, not {FEWEST_TEXTS}; "
                f"give {2 * FEWEST_TEXTS} or more"
            )
        return tuple(notes)


def _columns(hits: Float[np.ndarray, " M"], heads: int) -> Float[np.ndarray, "M C"]:
    """The same baseline for every head and the set."""
    return np.repeat(hits[:, None], heads + 1, axis=1)


def _with_set(masses: Masses, chosen: Sequence[int]) -> Float[np.ndarray, "M C"]:
    """The hits of every head, and last those of the set."""
    return np.column_stack([masses.hits(), masses.hits(masses.of_set(chosen))])


def _best(masses: Masses, selection: Bool[np.ndarray, " M"], size: int) -> Float[np.ndarray, "M C"]:
    """The hits of a null model's best head, for every head, and last those of its best set."""
    hits = masses.hits()[:, masses.best_head(selection)]
    best_set = masses.best_set(selection, size)
    columns = _columns(hits, len(masses.heads))
    columns[:, -1] = masses.hits(masses.of_set(best_set))[:, 0]
    return columns


def _stronger(
    known: Float[np.ndarray, "M C"] | None,
    hits: Float[np.ndarray, "M C"],
    selection: Bool[np.ndarray, " M"],
) -> Float[np.ndarray, "M C"]:
    """Per column, the baseline of several null models that is best on the selection half."""
    if known is None:
        return hits
    better = hits[selection].mean(0) > known[selection].mean(0)
    return np.where(better, hits, known)
