"""Find the role of each head: score relations, compare with nulls, test as one family.

`find_roles` reads from top to bottom: texts → relations → scores → hypotheses → tests → table.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import nn

from headwise._display import BEFOREHAND, counted, did_you_mean, measured_on
from headwise._extras import versions
from headwise._progress import Passes, Progress, shows_progress
from headwise.checkpoints import originals_of
from headwise.corpora import AnnotatedText, Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import check_model, fingerprint
from headwise.models.texts import context_of, tokenizer_of
from headwise.roles._copying import copying_scores
from headwise.roles._rows import (
    BEHAVIOR_LABELS,
    BY_COPYING,
    GROUP,
    NOT_FOUND,
    TEXT,
    labels_of_rows,
    length_measures,
    tested_rows,
)
from headwise.roles._samples import SEQUENCES, RoleSample, groups_of, probe_sample, text_sample
from headwise.roles._table import Roles
from headwise.roles.evidence import (
    FEWEST_TEXTS,
    NULLS,
    Baseline,
    Evidence,
    Hypotheses,
    has_role,
    hypotheses_of,
    is_promising,
    least_lift,
    null_head_baseline,
    plant,
    run_tests,
    strongest,
)
from headwise.roles.relations import (
    PROBED,
    SHAPES,
    Relations,
    Role,
    Tokenized,
    gold_roles,
    own_roles,
    probe,
    texts_of,
    token_roles,
    tokenize,
)
from headwise.tables import HeadsLike, named_heads

_MOST_UNKNOWN = 0.5  # of the tokens; above it the text is in no language of the model
_DRAWS = 1000  # resamples of the test under each further split, where no p is reported
_EXAMPLES = 3  # texts where a role is strongest, and as many where it is weakest
_EXCERPT = 200  # characters of a text shown as an example
# The forms in which relations are asked, by their score, and which form may contradict each.
_FORMS = {
    "top": "pairs, among all tokens; a ChoiceRelation, which asks for the right one among likely "
    "candidates, may find other heads, and heads that learned nothing may score high there",
    "choice": "a choice among candidates; pairs, which ask for the largest weight among all "
    "tokens, may find other heads",
}
_FEW = 4  # relations that are named


@shows_progress("Finding the roles of heads")
def find_roles(
    model: nn.Module,
    texts: Corpus,
    *,
    tokenizer: Any = None,
    relations: Relations | None = None,
    heads: HeadsLike | None = None,
    roles: Collection[str] | None = None,
    groups: Sequence[Hashable] | None = None,
    evidence: Evidence | None = None,
    max_tokens: int | None = None,
    on_progress: Progress | None = None,
) -> Roles:
    """Find what each head attends to, tested against baselines on held-out texts.

    A role is a relation: a set of (query, key) pairs of a text, such as a verb and its subject.
    A head has a role if it scores higher on held-out texts than every null (a baseline without
    knowledge of the relation) that applies: chance, the best fixed offset, rules about parts of
    speech and their order (where no text has tags, about the tokens that are keys in other texts),
    rules that choose among candidates (the nearest, the first, the longest, the most repeated),
    the best head of the same model with permuted or with initial weights, the same words in
    another order, and for repetition the same positions without repetition. It needs a lift of .25
    (the share of the range above the null that the head reaches; for trees ten points) and
    p < .05, adjusted over all heads and roles together that clear half of that bar on the
    selection half, on which heuristics and null heads are selected. The head must clear the whole
    bar there too. A role describes what a head attends to, not what the model uses it for.

    A relation with two ends is two roles, one in each direction. A role is tested only if the
    texts could have shown it: a planted head with the true pairs, diluted with uniform attention,
    has to be found by the same test, and some score has to be labeled with a probability of
    80 %. The outcome of each row is `found`, `not found`, or `not tested: ` and what is missing.

    The model reads every distinct text once, and random sequences with their controls; each
    null of `evidence` costs another pass, and `notes` counts them. Attention weights are
    computed for a few heads at a time. A text longer than the model's context is cut between
    sentences.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        texts: Texts, with or without annotations; trees, mentions and links add their roles.
            A string is one text.
        tokenizer: Its tokenizer, a fast one that reports character offsets. None takes the
            tokenizer of a `SentenceTransformer`.
        relations: Your own roles, by name: a function from a text to its pairs of tokens
            (query, key), a `headwise.roles.ChoiceRelation` among candidates that you name, or a
            `Role` with a score and a kind.
        heads: Heads named before these texts were seen: they alone have rows, and p is adjusted
            for them alone. None is all heads.
        roles: Names of roles, in the same way. What heads and roles both name is all tested,
            whatever the other half shows. None is all roles.
        groups: A label for each text, such as its document or template, where texts of one group
            depend on each other: a group is then one text in every half, resample, p and count
            of texts. None takes every distinct text as independent.
        evidence: Which nulls to evaluate, and the seed. None is `Evidence()`: every null that
            is available.
        max_tokens: The most tokens in one text. None is the model's context.
        on_progress: Called after each batch with the texts done and those of all passes together.
    Returns:
        A row per head and role, found or not.
    Raises:
        ArgumentError: two roles have one name, one of the texts is none, `evidence` names a
            null of examples, `roles` or `heads` name none, or `groups` does not fit the texts.
        HeadError: there is no such head.
        InputError: no text has a token, or most tokens are unknown to the tokenizer.
        UnsupportedError: the model cannot be observed exactly, the tokenizer does not report
            character offsets, or a null named in `evidence` is not available.
    """
    wrapper, model = model, check_model("find_roles", model)
    tokenizer = tokenizer_of(wrapper, tokenizer, "find_roles")
    evidence = evidence or Evidence()
    seed = evidence.seed
    if evidence.nulls and "exchanged" in evidence.nulls:
        raise ArgumentError(
            "find_roles: the null 'exchanged' is of examples, which have stretches. Leave it out."
        )
    if groups is not None:  # then texts are read twice
        texts = [texts] if isinstance(texts, str | AnnotatedText) else [*texts]
    n_texts, read = texts_of("find_roles", texts)
    named = groups_of(read if groups is None else texts, groups)
    group_of = {text.text: named[text.text] for text in read}  # without those of white space
    limit = context_of(model, tokenizer, max_tokens)
    tokenized = tokenize(tokenizer, read, limit)
    pieces = tokenized.pieces
    if not pieces:
        of = counted(len(read), "text")
        raise InputError(f"find_roles: {of} without a token. Give texts with words.")
    if tokenized.unknown > _MOST_UNKNOWN:
        raise InputError(
            f"find_roles: {tokenized.unknown:.0%} of the tokens of these texts are unknown to the "
            f"tokenizer. Give texts in a language that the model was trained on."
        )
    asked = [*gold_roles(pieces), *own_roles("find_roles", relations or {})]
    every = [*token_roles(pieces), *asked]
    times = Counter([*(role.name for role in (*every, *PROBED)), *BEHAVIOR_LABELS])
    if duplicates := sorted(name for name in times if times[name] > 1):
        raise ArgumentError(f"find_roles: {duplicates[0]!r} is a role already. Rename yours.")
    names = _named_roles(roles, [role.name for role in (*every, *PROBED)])
    samples = [
        text_sample(pieces, read, group_of, every, seed, shuffles=evidence.wants("shuffled"))
    ]
    probed = probe_sample(*probe(pieces, limit, SEQUENCES, seed), seed)
    samples += [] if probed is None else [probed]
    # Each model reads everything in one pass, whatever the number of splits.
    items = sum(len(sample.evaluator.items) for sample in samples)
    of_contrasts = sum(len(sample.contrast.items) for sample in samples if sample.contrast)
    passes = Passes(on_progress, (1 + evidence.n_models) * items + of_contrasts)
    scores = [sample.evaluator.scores(model, passes, detailed=True) for sample in samples]
    known = scores[0].heads
    shown = named_heads("find_roles", heads, known)
    contrasts = [
        sample.contrast.scores(model, passes) if sample.contrast else None for sample in samples
    ]
    splits = [
        [replace(sample, split=sample.split.another(seed, number)) for sample in samples]
        for number in range(evidence.n_splits)
    ]
    # For each split and sample, the best heads of the models of each null. Nothing else is kept of
    # their scores, which are large.
    null_heads: list[list[dict[str, Baseline]]] = [[{} for _ in samples] for _ in splits]
    n_models: Counter[str] = Counter()
    for null, null_model in evidence.models_like(model):
        n_models[null] += 1
        for index, sample in enumerate(samples):
            of_null = sample.evaluator.scores(null_model, passes)
            for split, best in zip(splits, null_heads, strict=True):
                heads_of_model = null_head_baseline(of_null, split[index].split)
                before = [best[index][null]] if null in best[index] else []
                best[index][null] = strongest([*before, heads_of_model])
    columns = [known.index(head) for head in shown]
    tested_roles = [
        [number for number, role in enumerate(sample.roles) if role.name in names]
        for sample in samples
    ]
    # What is tested: the hypotheses of each sample under the split of the results, and others.
    families, *further = (
        [
            hypotheses_of(*parts).only(numbers, columns, screened=heads is None or roles is None)
            for parts, numbers in zip(
                zip(split, scores, contrasts, best, strict=True), tested_roles, strict=True
            )
        ]
        for split, best in zip(splits, null_heads, strict=True)
    )
    for family, share in zip(families, _stability(families, further, seed), strict=True):
        family.measures["stability"] = share
    families[0].measures.update(length_measures(families[0], samples[0].lengths))
    tests = sum(int(is_promising(family).sum()) + len(family.roles) for family in families)
    # Each role is tested together with its planted head.
    planted = [
        plant(family, of.only(numbers), sample.split, tests=tests, seed=seed)
        for family, of, numbers, sample in zip(families, scores, tested_roles, samples, strict=True)
        if numbers
    ]
    tested = zip(planted, run_tests(planted, seed=seed), strict=True)
    n_groups = len(samples[0].split.selection)
    unit = TEXT if n_groups == len(group_of) else GROUP  # of sequences there are always enough
    rows = pd.concat([tested_rows(shown, *pair, unit) for pair in tested], ignore_index=True)
    if probed is not None and probed.contrast is not None and scores[0].causal:
        rows = _with_copying(rows, model, probed.contrast.items, seed)
    rows["label"] = labels_of_rows(rows)
    if original := originals_of(model, known):
        earlier = {str(h): str(was or "") for h, was in zip(known, original, strict=True)}
        rows["original"] = rows["name"].map(earlier)
    units = zip(dict.fromkeys(group_of.values()), samples[0].split.selection, strict=True)
    held = [text for text, selected in units if not selected]
    weights, made_with = fingerprint(model), versions()
    digest = hashlib.sha256(b"".join(samples[0].split.digests)).hexdigest()
    return Roles(
        rows=rows,
        meanings={role.name: role.says for family in families for role in family.roles},
        notes=(
            *_notes(tokenized, n_texts, samples, n_models, evidence.n_splits, len(group_of), unit),
            *evidence.left_out("permuted", "random", "shuffled"),
            f"p adjusted over {counted(len(shown), 'head')}{BEFOREHAND * (heads is not None)} × "
            f"{counted(len(names), 'role')}{BEFOREHAND * (roles is not None)}",
            measured_on(weights, "texts", digest, seed, made_with["headwise"]),
            *_other_forms(rows, asked),
            *_left_out(rows, samples[0], relations or {}),
        ),
        texts=_examples(rows, families[0], len(shown), held),
        sample={
            "texts": len(group_of),
            **({"groups": n_groups} if unit == GROUP else {}),
            "held_out": len(held),
            "sha256": digest,
            "seed": seed,
        },
        model=weights,
        versions=made_with,
    )


def _named_roles(named: Collection[str] | None, known: Sequence[str]) -> Collection[str]:
    """The names of the roles to test."""
    if named is None:
        return set(known)
    names = [named] if isinstance(named, str) else [*named]
    choices = [name for name in known if name not in SHAPES]
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        which = f"there is no role {unknown[0]!r}" if unknown else f"roles={named!r} names none"
        near = did_you_mean(str(unknown[0]), choices) if unknown else ""
        raise ArgumentError(f"find_roles: {which}.{near} There are {', '.join(choices)}.")
    return set(names)


def _stability(
    families: Sequence[Hypotheses], further: Sequence[Sequence[Hypotheses]], seed: int
) -> list[Float[np.ndarray, "R N"]]:
    """The share of the further splits under which each head has each role, for each sample.

    NaN without a further split.
    """
    if not further:
        return [np.full(family.value.shape[1:], np.nan) for family in families]
    found = []
    for split in further:
        tested = run_tests(split, draws=_DRAWS, seed=seed, intervals=False)
        found.append([has_role(*pair) for pair in zip(split, tested, strict=True)])
    return [
        np.mean(columns, axis=0).reshape(family.value.shape[1:])
        for family, columns in zip(families, zip(*found, strict=True), strict=True)
    ]


def _with_copying(
    rows: pd.DataFrame, model: nn.Module, items: Sequence[Any], seed: int
) -> pd.DataFrame:
    """Add the copying score of each head, on sequences that do not repeat, where it may label."""
    scores = copying_scores(model, [item.ids for item in items], seed)
    copies = rows["role"].isin(list(BY_COPYING))
    for index, end in enumerate(("", ".low", ".high") if scores else ()):
        by_name = {str(head): score[index] for head, score in scores.items()}
        rows[f"copying{end}"] = rows["name"].map(by_name).astype(float).where(copies)
    return rows


def _notes(
    tokenized: Tokenized,
    n_texts: int,
    samples: Sequence[RoleSample],
    n_models: Mapping[str, int],
    n_splits: int,
    distinct: int,
    unit: str,
) -> Iterator[str]:
    """How the texts were read and split, and which passes the scores took, in sentences."""
    selection = samples[0].split.selection
    units, held = len(selection), int((~selection).sum())
    of = "texts" if unit == TEXT else "groups of texts"
    yield (
        f"{counted(distinct, 'distinct text')} of {n_texts:,}; heads, rules and null heads "
        f"chosen on {units - held:,}, all numbers from the other {held:,}, as independent {of}"
    )
    if tokenized.unknown:
        yield f"{tokenized.unknown:.1%} of the tokens are unknown to the tokenizer"
    if cut := tokenized.cut_at_sentences + tokenized.cut_within:
        yield (
            f"{counted(cut, 'text was', 'texts were')} longer than what is read at once and "
            f"cut between sentences, {tokenized.cut_within} of them also within one"
        )
    if held < FEWEST_TEXTS:
        yield (
            f"roles of text were not tested: {counted(held, unit)}, not {FEWEST_TEXTS}; give "
            f"{2 * FEWEST_TEXTS} distinct {of} or more"
        )
    yield (
        f"{SEQUENCES} sequences of random tokens that repeat, and as many controls"
        if len(samples) > 1
        else "too few different tokens, or too short a context, for sequences"
    )
    contrast = samples[0].contrast is not None
    kinds = [f"{n} with {null} weights" for null, n in n_models.items()]
    kinds += ["one of shuffled words"] if contrast else []
    total = counted(1 + sum(n_models.values()) + contrast, "pass", "passes")
    listed = ", ".join(["the model's own", *kinds])
    yield f"{total} over the texts, about equally long: {listed}"
    yield (
        f"stability is the share of {counted(n_splits - 1, 'further random split')} of "
        f"the texts into halves under which the same procedure finds the role"
        if n_splits > 1
        else "one split of the texts into halves: stability is unknown"
    )


def _other_forms(rows: pd.DataFrame, asked: Sequence[Role]) -> Iterator[str]:
    """In which form relations that are not ours were asked, and what another may contradict."""
    for score, form in _FORMS.items():
        names = [role.name for role in asked if role.score == score]
        if names:
            few = ", ".join(names) if len(names) <= _FEW else f"{len(names)} relations"
            yield f"{few}: {form}"
    others = rows[[f"null.{null}" for null in NULLS if null != "shuffled"]].max(axis=1)
    is_refused = (rows["outcome"] == NOT_FOUND) & (rows["null"] == NULLS["shuffled"])
    for role in asked:
        bar = others + least_lift([role], others.to_numpy()) * (1 - others)
        refused = rows["name"][is_refused & (rows["role"] == role.name) & (rows["effect"] >= bar)]
        if len(refused):
            yield (
                f"{role.name}: only the same words in another order stand against "
                f"{', '.join(refused)}; p without that null was not computed"
            )


def _left_out(rows: pd.DataFrame, sample: RoleSample, own: Collection[str]) -> Iterator[str]:
    """How many held-out queries of choices of one's own decide nothing."""
    is_held = ~sample.split.selection[sample.split.text_of_item]
    held = [*compress(sample.evaluator.items, is_held)]
    of_roles = rows.groupby("role")["n"].max()
    for name in own:
        queries = sum(len({query for query, _ in item.candidates.get(name, ())}) for item in held)
        left_out = queries - int(of_roles.get(name, queries))
        if queries and left_out:
            yield (
                f"{name}: {left_out:,} of {counted(queries, 'held-out query', 'held-out queries')} "
                f"left out: candidates that a head may attend to are all right, or all wrong"
            )


def _examples(
    rows: pd.DataFrame, family: Hypotheses, heads: int, texts: Sequence[str]
) -> dict[str, list[tuple[str, float, int]]]:
    """Held-out texts where heads show their roles most, then those where they show them least."""
    examples: dict[str, list[tuple[str, float, int]]] = {}
    columns = len(family.roles) * heads  # the other rows are of random sequences
    for column in np.flatnonzero(rows["found"][:columns]):
        value, count = (
            of[:, column // heads, column % heads] for of in (family.value, family.count)
        )
        with_query = np.flatnonzero(count)
        rates = value[with_query] / count[with_query]
        order = with_query[np.lexsort((-count[with_query], -rates))]
        examples[f"{rows['name'][column]} {rows['role'][column]}"] = [
            (texts[text][:_EXCERPT], float(value[text] / count[text]), int(count[text]))
            for text in dict.fromkeys([*order[:_EXAMPLES], *order[-_EXAMPLES:]])
        ]
    return examples
