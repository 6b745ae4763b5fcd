"""Find the role of each head: evaluate relations, compare with nulls, test as one family."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from headwise._display import counted
from headwise._progress import Progress, shows_progress
from headwise.corpora import Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import (
    check_model,
    context_of,
    fingerprint,
    originals_of,
    tokenizer_of,
    without_compiler,
)
from headwise.roles.effects import BEHAVIOUR_LABELS, Effects, Score, copying_scores, labels_of_rows
from headwise.roles.relations import (
    PROBED,
    Pairs,
    Role,
    Tokenized,
    TokenText,
    gold_roles,
    texts_of,
    token_roles,
    tokenize,
)
from headwise.roles.results import Roles, length_measures, tested_rows
from headwise.roles.testing import (
    FEWEST_TEXTS,
    SEQUENCES,
    Evaluated,
    Evidence,
    Family,
    Trial,
    distinct_texts,
    is_promising,
    judge,
    plant,
    probe_trial,
    text_trial,
)

_MOST_UNKNOWN = 0.5  # of the tokens; above it the text is in no language of the model
_EXAMPLES = 3  # texts where a role is strongest, and as many where it is weakest
_EXCERPT = 200  # characters of a text shown as an example


@shows_progress("Finding the roles of heads")
def find_roles(
    model: nn.Module,
    tokenizer: Any,
    corpus: Corpus,
    *,
    relations: Mapping[str, Callable[[TokenText], Pairs]] | None = None,
    evidence: Evidence | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Roles:
    """Find what each head attends to, tested against baselines on held-out texts.

    A role is a relation: a set of (query, key) pairs of a text, such as a verb and its subject.
    A head has a role if it scores higher on held-out texts than every null (a baseline without
    knowledge of the relation) that applies: chance, the best fixed offset, rules about parts of
    speech and their order, rules that choose among candidates (the nearest, the first, the
    longest, the most repeated), the best head of the same model with permuted or with initial
    weights, the same words in another order, and for repetition the same positions without
    repetition. It needs a lift of .25 (the share of the range above the null that the head
    reaches; for trees ten points) and p < .05, adjusted over all heads and roles together that
    clear half of that bar on the selection half, on which heuristics and null heads are
    selected. The head must clear the whole bar there too. A role describes what a head attends
    to, not what the model uses it for.

    A relation with two ends is two roles, one in each direction. A role is tested only if the
    texts could have shown it: a planted head with the true pairs, diluted with even attention,
    has to be found by the same test. The outcome of each row says which of the three it is.

    The model reads every distinct text once, and random sequences with their controls; each
    null of `evidence` costs another pass, and `notes` counts them. Attention weights are
    computed for a few heads at a time. A text longer than the model's context is cut between
    sentences.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        tokenizer: Its tokenizer, a fast one that reports character offsets. None takes the
            tokenizer of a `SentenceTransformer`.
        corpus: Texts, with or without annotations; trees, mentions and links add their roles.
            A string is one text.
        relations: Your own roles, by name: from a text to its pairs of tokens (query, key).
        evidence: Which nulls to evaluate, and the seed. None is `Evidence()`: every null that
            is available.
        max_tokens: The most tokens in one text. None is the model's context.
        on_progress: Called after each batch of a pass with the number of texts done and of all.
    Returns:
        A row per head and role, found or not.
    Raises:
        ArgumentError: two roles have one name, or something in the corpus is not a text.
        InputError: no text has a token, or most tokens are unknown to the tokenizer.
        UnsupportedError: the model cannot be observed exactly, the tokenizer does not report
            character offsets, or a null named in `evidence` is not available.
    """
    wrapper, model = without_compiler(model), check_model("find_roles", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "find_roles")
    evidence = evidence or Evidence()
    n_texts, texts = texts_of("find_roles", corpus)
    limit = context_of(model, tokenizer)
    limit = limit if max_tokens is None else min(limit, max_tokens)
    tokenized = _tokenized(tokenizer, texts, limit)
    text = text_trial(tokenized, texts, _roles(tokenized, relations or {}), evidence)
    probe = probe_trial(tokenized, limit, evidence.seed)
    trials = [text] if probe is None else [text, probe]
    evaluated = Evaluated.of(model, trials, evidence, on_progress)
    families, heads = _families(evaluated, text, evidence.seed), evaluated.scores[0].heads
    rows = _tested(evaluated, families, evidence.seed)
    if probe is not None and evaluated.scores[0].causal:
        rows = _with_copying(rows, _copying(model, probe, evidence.seed))
    rows["label"] = labels_of_rows(rows, Effects())
    original = originals_of(model, heads)
    if original:
        names = {str(head): str(was or "") for head, was in zip(heads, original, strict=True)}
        rows["original"] = rows["name"].map(names)
    held_out = _held_out(distinct_texts(texts), text)
    return Roles(
        rows=rows,
        meanings={role.name: role.says for family in families for role in family.roles},
        notes=(*_notes(tokenized, n_texts, trials), evaluated.passes, _splits_note(evidence)),
        texts=_examples(rows, families[0], len(heads), held_out),
        model=fingerprint(model),
        versions={name: version(name) for name in ("headwise", "torch")},
    )


def _tokenized(tokenizer: Any, texts: Sequence[Any], limit: int) -> Tokenized:
    tokenized = tokenize(tokenizer, texts, limit)
    if not tokenized.pieces:
        n_texts = counted(len(texts), "text")
        raise InputError(f"find_roles: {n_texts} without a token. Give texts with words.")
    if tokenized.unknown > _MOST_UNKNOWN:
        raise InputError(
            f"find_roles: {tokenized.unknown:.0%} of the tokens of these texts are unknown to the "
            f"tokenizer. Give texts in a language that the model was trained on."
        )
    return tokenized


def _roles(
    tokenized: Tokenized, relations: Mapping[str, Callable[[TokenText], Pairs]]
) -> list[Role]:
    pieces = tokenized.pieces
    roles = [*token_roles(pieces), *gold_roles(pieces)]
    roles += [Role(name, f"your relation {name}", pairs) for name, pairs in relations.items()]
    names = [*(role.name for role in (*roles, *PROBED)), *BEHAVIOUR_LABELS]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ArgumentError(f"find_roles: {duplicates[0]!r} is a role already. Rename yours.")
    return roles


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
    controls = [
        plant(family, scores, trial.split, tests=tests, seed=seed)
        for family, scores, trial in trials
    ]
    verdicts = judge([control.family for control in controls], seed=seed)
    heads = evaluated.scores[0].heads
    return pd.concat(
        [tested_rows(heads, *pair) for pair in zip(controls, verdicts, strict=True)],
        ignore_index=True,
    )


def _copying(model: nn.Module, probe: Trial, seed: int) -> dict[str, Score]:
    """The copying score of each head by its name, on the sequences that do not repeat."""
    assert probe.contrast is not None
    sequences = [item.ids for item in probe.contrast.items]
    return {str(head): score for head, score in copying_scores(model, sequences, seed).items()}


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


def _notes(tokenized: Tokenized, n_texts: int, trials: Sequence[Trial]) -> tuple[str, ...]:
    selection = trials[0].split.selection
    distinct, held = len(selection), int((~selection).sum())
    notes = [
        f"{distinct} distinct texts of {n_texts}; heads, rules and null heads chosen on "
        f"{distinct - held}, all numbers from the other {held}",
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
            f"roles of text were not tested: {held} held-out texts, not {FEWEST_TEXTS}; give "
            f"{2 * FEWEST_TEXTS} distinct texts or more"
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
                texts[text][:_EXCERPT],
                float(family.value[text, column] / count[text]),
                int(count[text]),
            )
            for text in chosen
        ]
    return examples
