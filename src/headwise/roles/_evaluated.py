"""From the scores of all trials to the table of roles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import nn

from headwise._display import counted
from headwise._progress import Passes, Progress
from headwise.roles.effects import Score
from headwise.roles.evaluation import DetailedScores, RoleScores
from headwise.roles.results import BY_COPYING, Roles, labels_of_rows, length_measures, tested_rows
from headwise.roles.testing import (
    Baseline,
    Evidence,
    Family,
    Trial,
    halves,
    halves_of_texts,
    has_role,
    is_promising,
    judge,
    make_family,
    null_head_baseline,
    plant,
)

_DRAWS = 1000  # resamples of the test under each further split
_EXAMPLES = 3  # texts where a role is strongest, and as many where it is weakest
EXCERPT = 200  # characters of a text shown as an example

# The best null heads of one model, for each split and trial.
NullHeads = Sequence[Sequence[Baseline]]


@dataclass(frozen=True)
class Evaluated:
    """What each head and the best null heads score, for several splits of the same texts.

    Attributes:
        trials: The trials under each split; results are reported of the first.
        scores: The scores of each trial, whatever its split.
        contrasts: The scores of each trial's contrast.
        null_heads: The best heads of each null model, by the name of the null.
    """

    trials: Sequence[Sequence[Trial]]
    scores: Sequence[DetailedScores]
    contrasts: Sequence[RoleScores | None]
    null_heads: Mapping[str, Sequence[NullHeads]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        trials: Sequence[Trial],
        evidence: Evidence,
        on_progress: Progress | None,
    ) -> "Evaluated":
        """Evaluate the model and its null models, each in one pass for all splits."""
        passes = Passes(on_progress, _n_items(trials, evidence))
        scores = [trial.evaluator.evaluate_detailed(model, passes) for trial in trials]
        contrasts = [
            None if trial.contrast is None else trial.contrast.evaluate(model, passes)
            for trial in trials
        ]
        nulls = (
            (null, [trial.evaluator.evaluate(null_model, passes) for trial in trials])
            for null, null_model in evidence.models_like(model)
        )
        return cls.of_scores(trials, evidence, scores, contrasts, nulls)

    @classmethod
    def of_scores(
        cls,
        trials: Sequence[Trial],
        evidence: Evidence,
        scores: Sequence[DetailedScores],
        contrasts: Sequence[RoleScores | None],
        nulls: Iterable[tuple[str, Sequence[RoleScores]]],
    ) -> "Evaluated":
        """Keep the best heads of null models; `nulls` has the scores of each in every trial."""
        splits = [
            [_resplit(trial, evidence, n) for trial in trials] for n in range(evidence.n_splits)
        ]
        null_heads: dict[str, list[NullHeads]] = {}
        for null, of_null in nulls:
            null_heads.setdefault(null, []).append(_best_null_heads(of_null, splits))
        return cls(splits, scores, contrasts, null_heads)

    def families(self, split: int = 0) -> list[Family]:
        """The hypotheses of each trial under a split."""
        return [
            make_family(
                trial,
                self.scores[index],
                contrast=self.contrasts[index],
                null_heads={
                    null: Baseline.strongest([best[split][index] for best in models])
                    for null, models in self.null_heads.items()
                },
            )
            for index, trial in enumerate(self.trials[split])
        ]

    def stability(self, seed: int) -> list[Float[np.ndarray, " _"]]:
        """The share of the further splits under which each head has each role, for each trial.

        NaN without a further split.
        """
        per_split = []
        for split in range(1, len(self.trials)):
            families = self.families(split)
            verdicts = judge(families, draws=_DRAWS, seed=seed, intervals=False)
            pairs = zip(families, verdicts, strict=True)
            per_split.append([has_role(*pair) for pair in pairs])
        if not per_split:
            sizes = (scores.value.shape[1:] for scores in self.scores)
            return [np.full(roles * heads, np.nan) for roles, heads in sizes]
        return [np.mean(columns, axis=0) for columns in zip(*per_split, strict=True)]

    @property
    def passes(self) -> str:
        """How many passes over the texts the evaluation took, and for which models."""
        contrast = self.trials[0][0].contrast is not None
        kinds = ["the model's own"]
        kinds += [f"{len(models)} with {null} weights" for null, models in self.null_heads.items()]
        kinds += ["one of shuffled words"] if contrast else []
        total = 1 + sum(map(len, self.null_heads.values())) + contrast
        count = counted(total, "pass", "passes")
        return f"{count} over the texts, about equally long: {', '.join(kinds)}"


def _best_null_heads(scores: Sequence[RoleScores], splits: Sequence[Sequence[Trial]]) -> NullHeads:
    """The best heads of a null model, from its scores in each trial, for each split."""
    return [
        [
            null_head_baseline(null_scores, trial.split)
            for null_scores, trial in zip(scores, trials, strict=True)
        ]
        for trials in splits
    ]


def _resplit(trial: Trial, evidence: Evidence, number: int) -> Trial:
    """The trial with another split of its texts; number 0 keeps its own."""
    if number == 0:
        return trial
    split = trial.split
    if split.digests:
        selection = halves_of_texts(split.digests, evidence.seed, number)
    else:
        selection = halves(len(split.selection), [evidence.seed, number])
    return replace(trial, split=replace(split, selection=selection))


def _n_items(trials: Sequence[Trial], evidence: Evidence) -> int:
    """The number of items in all passes over the trials."""
    models = 1 + evidence.n_models
    contrasts = (trial.contrast.items for trial in trials if trial.contrast is not None)
    return models * sum(len(trial.evaluator.items) for trial in trials) + sum(map(len, contrasts))


def judged(
    evaluated: Evaluated,
    evidence: Evidence,
    *,
    texts: Sequence[str],
    notes: Sequence[str],
    copying: Mapping[str, Score],
    original: Sequence[Any],
    model: str,
) -> Roles:
    """The roles that follow from the scores of all trials.

    Args:
        texts: The distinct texts.
        notes: Sentences about the texts, for `Roles.notes`.
        copying: The copying score of each head by its name; none in an encoder.
        original: The name that each head had in the full model; none if it was not pruned.
        model: The fingerprint of the model.
    """
    text, heads = evaluated.trials[0][0], evaluated.scores[0].heads
    families = _families(evaluated, text, evidence.seed)
    rows = _tested(evaluated, families, evidence.seed)
    if copying:
        rows = _with_copying(rows, copying)
    rows["label"] = labels_of_rows(rows)
    if original:
        pairs = zip(heads, original, strict=True)
        rows["original"] = rows["name"].map({str(head): str(was or "") for head, was in pairs})
    held_out = _held_out(texts, text)
    return Roles(
        rows=rows,
        meanings={role.name: role.says for family in families for role in family.roles},
        notes=(*notes, evaluated.passes, _splits_note(evidence)),
        texts=_examples(rows, families[0], len(heads), held_out),
        model=model,
        versions={name: version(name) for name in ("headwise", "torch")},
    )


def _families(evaluated: Evaluated, text: Trial, seed: int) -> list[Family]:
    """The hypotheses of each trial, with their stability, and how attention depends on length."""
    families = evaluated.families()
    for family, share in zip(families, evaluated.stability(seed), strict=True):
        family.measures["stability"] = share
    families[0].measures.update(length_measures(families[0], text.lengths, seed))
    return families


def _tested(evaluated: Evaluated, families: Sequence[Family], seed: int) -> pd.DataFrame:
    """The rows of all roles, each tested together with its planted head."""
    tests = sum(int(is_promising(family).sum()) + len(family.roles) for family in families)
    trials = zip(families, evaluated.scores, evaluated.trials[0], strict=True)
    planted = [
        plant(family, scores, trial.split, tests=tests, seed=seed)
        for family, scores, trial in trials
    ]
    pairs = zip(planted, judge(planted, seed=seed), strict=True)
    heads = evaluated.scores[0].heads
    return pd.concat([tested_rows(heads, *pair) for pair in pairs], ignore_index=True)


def _with_copying(rows: pd.DataFrame, scores: Mapping[str, Score]) -> pd.DataFrame:
    """Add the copying score of each head to the rows of the roles that it may label."""
    copies = rows["role"].isin(list(BY_COPYING))
    for index, end in enumerate(("", ".low", ".high")):
        by_name = {name: score[index] for name, score in scores.items()}
        column = rows["name"].map(by_name).astype(float)
        rows[f"copying{end}"] = column.where(copies)
    return rows


def _splits_note(evidence: Evidence) -> str:
    if evidence.n_splits == 1:
        return "one split of the texts into halves: stability is unknown"
    return (
        f"stability is the share of {counted(evidence.n_splits - 1, 'further random split')} of "
        f"the texts into halves under which the same procedure finds the role"
    )


def _held_out(texts: Sequence[str], trial: Trial) -> list[str]:
    """The texts on which nothing was selected."""
    pairs = zip(texts, trial.split.selection, strict=True)
    return [text for text, selected in pairs if not selected]


def _examples(
    rows: pd.DataFrame, family: Family, heads: int, texts: Sequence[str]
) -> dict[str, list[tuple[str, float, int]]]:
    """Held-out texts where heads show their roles most, then those where they show them least."""
    examples: dict[str, list[tuple[str, float, int]]] = {}
    columns = len(family.roles) * heads  # the other rows are of random sequences
    for column in np.flatnonzero(rows["found"][:columns]):
        count = family.count[:, column]
        with_query = np.flatnonzero(count)
        rate = family.value[with_query, column] / count[with_query]
        order = with_query[np.lexsort((-count[with_query], -rate))]
        chosen = dict.fromkeys([*order[:_EXAMPLES], *order[-_EXAMPLES:]])
        examples[f"{rows['name'][column]} {rows['role'][column]}"] = [
            (
                texts[text][:EXCERPT],
                float(family.value[text, column] / count[text]),
                int(count[text]),
            )
            for text in chosen
        ]
    return examples
