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
from headwise.roles.results import outcomes
from headwise.roles.task._examples import TokenExample
from headwise.roles.task._masses import POSITIONS, Masses, chance, masses_of, positional_hits
from headwise.roles.task._table import NULLS
from headwise.roles.testing import FEWEST_TEXTS, LEVEL, Evidence, Family, Verdict, halves, lift

BAR = 0.25  # of the lift, as for roles
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
        selection = halves(len(examples), evidence.seed)
        shuffles = evidence.wants("shuffled")
        passes = Passes(on_progress, len(examples) * (1 + shuffles + evidence.n_models))
        masses = masses_of(model, examples, passes)
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
                    masses.random_sets(len(chosen), evidence.seed),
                ]
            ),
        }
        names = _NULL_NAMES | {"position": POSITIONS[rule]}
        if shuffles:
            rng = np.random.default_rng(evidence.seed)
            dealt = masses_of(model, [e.shuffled(rng) for e in examples], passes)
            nulls["shuffled"] = _with_set(dealt, chosen)
        for name, null_model in evidence.models_like(model):
            null = masses_of(null_model, examples, passes)
            hits = _best(null, selection, size)
            nulls[name] = _stronger(nulls.get(name), hits, selection)
        return cls(masses, selection, chosen, nulls, names)

    def family(self) -> Family:
        """The hypotheses on the held-out examples: every head, and the set."""
        held = ~self.selection
        value = _with_set(self.masses, self.chosen)[held]
        nulls = {name: self._null(name, held, value.shape) for name in NULLS}
        return Family(value, np.ones_like(value), nulls)

    def _null(
        self, name: str, held: Bool[np.ndarray, " M"], shape: tuple[int, ...]
    ) -> Float[np.ndarray, "held C"]:
        return self.nulls[name][held] if name in self.nulls else np.full(shape, np.nan)

    def found(self, verdict: Verdict) -> Bool[np.ndarray, " C"]:
        """Which heads, and last the set, are significant and clear the bar on both halves."""
        selected = _with_set(self.masses, self.chosen)[self.selection].mean(0)
        found: Bool[np.ndarray, " C"] = verdict.p < LEVEL
        for effect in (selected, verdict.effect):
            found &= lift(effect, verdict.baseline) >= BAR
        return found

    def frame(self, verdict: Verdict, found: Bool[np.ndarray, " C"]) -> pd.DataFrame:
        """A row per head, and a last one for the set."""
        heads, held = self.masses.heads, ~self.selection
        margins = np.column_stack(
            [self.masses.margins(), self.masses.margins(self.masses.of_set(self.chosen))]
        )
        hits = _with_set(self.masses, self.chosen)
        null = [NULLS[row] if row >= 0 else "" for row in verdict.null.tolist()]
        columns: dict[str, Any] = {
            "name": [*map(str, heads), ""],
            "stack": [*(head.stack for head in heads), ""],
            "layer": [*(head.layer for head in heads), -1],
            "head": [*(head.head for head in heads), -1],
            "in_set": [*(head in self.chosen for head in range(len(heads))), True],
            "found": found,
            "outcome": outcomes(found, verdict.p, verdict.texts, np.zeros(len(found), dtype=bool)),
            "effect": verdict.effect,
            "null": [self.null_names.get(name, "") for name in null],
            "baseline": verdict.baseline,
            "lift": verdict.lift,
            "ci_low": verdict.low,
            "ci_high": verdict.high,
            "p_adj": verdict.p,
            "contrast": margins[held].mean(0),
            "n": verdict.n,
            "chosen_half": hits[self.selection].mean(0),
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
