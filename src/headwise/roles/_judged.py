"""From the scores of all trials to the table of roles."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd

from headwise._display import counted
from headwise.roles.effects import Effects, Score, labels_of_rows
from headwise.roles.relations import PROBED, Tokenized
from headwise.roles.results import Roles, length_measures, tested_rows
from headwise.roles.testing import (
    FEWEST_TEXTS,
    SEQUENCES,
    Evaluated,
    Evidence,
    Family,
    Trial,
    is_promising,
    judge,
    plant,
)

_EXAMPLES = 3  # texts where a role is strongest, and as many where it is weakest
EXCERPT = 200  # characters of a text shown as an example


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
    rows["label"] = labels_of_rows(rows, Effects())
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
    """Add the copying score of each head to the rows of the roles of probes."""
    probed = rows["role"].isin([role.name for role in PROBED])
    for index, end in enumerate(("", ".low", ".high")):
        by_name = {name: score[index] for name, score in scores.items()}
        column = rows["name"].map(by_name).astype(float)
        rows[f"copying{end}"] = column.where(probed)
    return rows


def _splits_note(evidence: Evidence) -> str:
    if evidence.n_splits == 1:
        return "one split of the texts into halves: stability is unknown"
    return (
        f"stability is the share of {evidence.n_splits - 1} further random splits of the texts "
        f"into halves under which the same procedure finds the role"
    )


def _held_out(texts: Sequence[str], trial: Trial) -> list[str]:
    """The texts on which nothing was selected."""
    pairs = zip(texts, trial.split.selection, strict=True)
    return [text for text, selected in pairs if not selected]


def notes_on(tokenized: Tokenized, n_texts: int, trials: Sequence[Trial]) -> tuple[str, ...]:
    selection = trials[0].split.selection
    distinct, held = len(selection), int((~selection).sum())
    notes = [
        f"{counted(distinct, 'distinct text')} of {n_texts:,}; heads, rules and null heads chosen "
        f"on {distinct - held:,}, all numbers from the other {held:,}",
    ]
    if tokenized.unknown:
        notes.append(f"{tokenized.unknown:.1%} of the tokens are unknown to the tokenizer")
    if tokenized.cut_at_sentences or tokenized.cut_within:
        cut = tokenized.cut_at_sentences + tokenized.cut_within
        notes.append(
            f"{counted(cut, 'text was', 'texts were')} longer than what is read at once and "
            f"cut between sentences, {tokenized.cut_within} of them also within one"
        )
    if held < FEWEST_TEXTS:
        notes.append(
            f"roles of text were not tested: {counted(held, 'held-out text')}, not "
            f"{FEWEST_TEXTS}; give {2 * FEWEST_TEXTS} distinct texts or more"
        )
    notes.append(
        f"{SEQUENCES} sequences of random tokens that repeat, and as many controls"
        if len(trials) > 1
        else "too few different tokens, or too short a context, for sequences"
    )
    return tuple(notes)


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
