"""Scores of all trials, and the families that follow from them for each split of the texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from torch import nn

from headwise._display import counted
from headwise._progress import Progress
from headwise.roles.evaluation import DetailedScores, RoleScores
from headwise.roles.testing._evidence import Family, halves, has_role, judge
from headwise.roles.testing._families import Baseline, make_family, null_head_baseline
from headwise.roles.testing._nulls import Evidence
from headwise.roles.testing._trials import Trial, halves_of_texts

_DRAWS = 1000  # resamples of the test under each further split

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
        scores = [trial.evaluator.evaluate_detailed(model, on_progress) for trial in trials]
        contrasts = [
            None if trial.contrast is None else trial.contrast.evaluate(model, on_progress)
            for trial in trials
        ]
        splits = [
            [resplit(trial, evidence, n) for trial in trials] for n in range(evidence.n_splits)
        ]
        null_heads: dict[str, list[NullHeads]] = {}
        for null, null_model in evidence.models_like(model):
            of_null = [trial.evaluator.evaluate(null_model, on_progress) for trial in trials]
            null_heads.setdefault(null, []).append(best_null_heads(of_null, splits))
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


def best_null_heads(scores: Sequence[RoleScores], splits: Sequence[Sequence[Trial]]) -> NullHeads:
    """The best heads of a null model, from its scores in each trial, for each split."""
    return [
        [
            null_head_baseline(null_scores, trial.split)
            for null_scores, trial in zip(scores, trials, strict=True)
        ]
        for trials in splits
    ]


def resplit(trial: Trial, evidence: Evidence, number: int) -> Trial:
    """The trial with another split of its texts; number 0 keeps its own."""
    if number == 0:
        return trial
    split = trial.split
    if split.digests:
        selection = halves_of_texts(split.digests, evidence.seed, number)
    else:
        selection = halves(len(split.selection), [evidence.seed, number])
    return replace(trial, split=replace(split, selection=selection))
