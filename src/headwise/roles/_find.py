"""Find out what each head does: read, compare with nulls, judge as one family."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from torch import nn

from headwise._display import counted
from headwise.corpora import AnnotatedText, Corpus
from headwise.errors import ArgumentError, InputError
from headwise.models import check_model, context_of, fingerprint, tokenizer_of
from headwise.roles._evidence import FEWEST_TEXTS, Verdict, halves, judge, lift
from headwise.roles._families import Baseline, Contrast, Family, Split, make_family, rival
from headwise.roles._nulls import Evidence, shuffled
from headwise.roles._outcome import outcomes
from headwise.roles._table import LEVEL, NULLS, Roles
from headwise.roles.evaluation import Progress, Reader
from headwise.roles.relations import (
    PROBED,
    Pairs,
    Role,
    Tokenized,
    TokenText,
    as_item,
    gold_roles,
    probe,
    texts_of,
    token_roles,
    tokenize,
)
from headwise.tables import Head

_SEQUENCES = 100  # of random tokens
_FOREIGN = 0.5  # of the tokens unknown: no text of this model's language
_SHOWN = 3  # texts where a role is strongest, and as many where it fails
_LONGEST = 200  # characters of a text that are shown


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
    """Find out what each head does, with evidence that would stand up.

    A head has a role if, on texts that nothing was chosen on, it does better than every null
    that applies: chance, the best fixed offset, the nearest word of a class, the best head of
    the same model with permuted weights and of one that learned nothing, the same words in
    another order, and for repetition the same positions without any. Better means by a lift of
    .25 (for trees by ten points) and with p < .05, adjusted over all heads and roles together;
    on the half of the texts where rules are chosen it must lie as far above those nulls.
    Attending is not doing: a role says what a head looks at, not what for.

    The model reads every distinct text once, and as many sequences of random tokens and their
    controls; each null of `evidence` is a reading more, and `notes` says how many there were.
    Weights are made for a few heads at a time. A text longer than the model reads is cut at
    sentence ends.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        tokenizer: Its tokenizer, one that says where its tokens stand (a fast one). None is that of
            a `SentenceTransformer`.
        corpus: Texts, with or without annotations; trees, mentions and links add their roles.
            A string is one text.
        relations: Roles of your own, by name: from a text to its pairs of tokens (query, key).
        evidence: Which nulls are read, and what decides all that is drawn. None is an
            `Evidence()`: every null that can be had.
        max_tokens: The most tokens in one text. None is what the model can read.
        on_text: Told after each batch of a reading how many texts are done, of how many.
    Returns:
        A row per head and role, found or not.
    Raises:
        ArgumentError: a role is given twice, or the corpus holds what is not a text.
        InputError: there is no text with a token, or most tokens are unknown to the tokenizer.
        UnsupportedError: the model cannot be watched exactly, the tokenizer does not say where
            its tokens stand, or a null was asked for that cannot be had.
    """
    outer, model = model, check_model("find_roles", model)
    tokenizer = tokenizer_of(outer, tokenizer, "find_roles")
    evidence = evidence or Evidence()
    given, texts = texts_of("find_roles", corpus)
    limit = context_of(model, tokenizer)
    limit = limit if max_tokens is None else min(limit, max_tokens)
    tokenized = tokenize(tokenizer, texts, limit)
    if not tokenized.pieces:
        said = counted(len(texts), "text")
        raise InputError(f"find_roles: {said} without a token. Give texts with words.")
    if tokenized.unknown > _FOREIGN:
        raise InputError(
            f"find_roles: {tokenized.unknown:.0%} of the tokens of these texts are unknown to the "
            f"tokenizer. Give texts in a language that the model has read."
        )
    question = _Question(tokenized, texts, evidence, _roles(tokenized, relations or {}))
    trials = [question.of_text(), *question.of_sequences(limit)]
    families, heads, readings = _held_against(model, trials, evidence, on_progress)
    verdicts = judge([family.scored for family in families], seed=evidence.seed)
    rows = pd.concat(
        [_rows(heads, *both) for both in zip(families, verdicts, strict=True)], ignore_index=True
    )
    return Roles(
        rows=rows,
        meanings={role.name: role.says for family in families for role in family.roles},
        notes=(*question.notes(given, trials), readings),
        texts=_examples(rows, families[0], heads, question.held_texts()),
        model=fingerprint(model),
        versions={name: version(name) for name in ("headwise", "torch")},
    )


def _roles(
    tokenized: Tokenized, relations: Mapping[str, Callable[[TokenText], Pairs]]
) -> list[Role]:
    pieces = tokenized.pieces
    roles = [*token_roles(pieces), *gold_roles(pieces)]
    roles += [Role(name, f"your relation {name}", pairs) for name, pairs in relations.items()]
    names = [role.name for role in (*roles, *PROBED)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"find_roles: {twice[0]!r} is a role already. Rename yours.")
    return roles


@dataclass(frozen=True)
class _Trial:
    """Texts that every model reads, and the same heads where some of the roles mean nothing."""

    reader: Reader
    split: Split
    contrast: str = ""
    apart: Reader | None = None

    def contrasted(self, model: nn.Module, on_progress: Progress | None) -> Contrast | None:
        if self.apart is None:
            return None
        at = [self.reader.roles.index(role) for role in self.apart.roles]
        return Contrast(self.contrast, at, self.apart.read(model, on_progress))


@dataclass(frozen=True)
class _Question:
    """What every model is asked, the watched one and the null ones alike."""

    tokenized: Tokenized
    texts: Sequence[AnnotatedText]
    evidence: Evidence
    roles: Sequence[Role]

    def of_text(self) -> _Trial:
        of = {text: at for at, text in enumerate(self._units)}
        pieces, seed = self.tokenized.pieces, self.evidence.seed
        items = [as_item(piece, self.roles) for piece in pieces]
        tags = sorted({tag for text in self.texts for tag in text.tags} - {"_"})
        split = Split(np.array([of[piece.text.text] for piece in pieces]), self._chosen)
        structure = [role for role in self.roles if role.kind == "structure"]
        apart = None
        if structure and self.evidence.wants("shuffled"):
            apart = Reader(shuffled(items, structure, seed), structure)
        return _Trial(Reader(items, self.roles, tags), split, "shuffled", apart)

    def of_sequences(self, limit: int) -> Iterator[_Trial]:
        seed = self.evidence.seed
        repeated, controls = probe(self.tokenized.pieces, limit, _SEQUENCES, seed)
        if repeated:
            split = Split(np.arange(len(repeated)), halves(len(repeated), seed))
            yield _Trial(Reader(repeated, PROBED), split, "control", Reader(controls, PROBED))

    def held_texts(self) -> list[str]:
        """The texts that nothing was chosen on."""
        return [text for text, chosen in zip(self._units, self._chosen, strict=True) if not chosen]

    def notes(self, given: int, trials: Sequence[_Trial]) -> tuple[str, ...]:
        held, split, distinct = len(self.held_texts()), self.tokenized, len(self._units)
        notes = [
            f"{distinct} distinct texts of {given}; heads, rules and null heads chosen on "
            f"{distinct - held}, all numbers from the other {held}",
        ]
        if split.unknown:
            notes.append(f"{split.unknown:.1%} of the tokens are unknown to the tokenizer")
        if split.cut_at_sentences or split.cut_within:
            cut = split.cut_at_sentences + split.cut_within
            notes.append(
                f"{counted(cut, 'text was', 'texts were')} longer than what is read at once and "
                f"cut between sentences, {split.cut_within} of them also within one"
            )
        if held < FEWEST_TEXTS:
            notes.append(
                f"roles of text were not tested: {held} held-out texts, not {FEWEST_TEXTS}; give "
                f"{2 * FEWEST_TEXTS} distinct texts or more"
            )
        notes.append(
            f"{_SEQUENCES} sequences of random tokens that repeat, and as many controls"
            if len(trials) > 1
            else "too few different tokens, or too short a context, for sequences"
        )
        return tuple(notes)

    @property
    def _units(self) -> list[str]:
        """What is drawn, flipped and split: a text, however often it is annotated."""
        return list(dict.fromkeys(one.text for one in self.texts))

    @property
    def _chosen(self) -> Bool[np.ndarray, " M"]:
        return halves(len(self._units), self.evidence.seed)


def _held_against(
    model: nn.Module, trials: Sequence[_Trial], evidence: Evidence, on_progress: Progress | None
) -> tuple[list[Family], tuple[Head, ...], str]:
    """The families of all trials, the heads, and how many readings that took."""
    seen = [trial.reader.read_closely(model, on_progress) for trial in trials]
    contrasts = [trial.contrasted(model, on_progress) for trial in trials]
    rivals: dict[str, list[list[Baseline]]] = {}
    for name, other in evidence.models_like(model):
        best = [rival(trial.reader.read(other, on_progress), trial.split) for trial in trials]
        rivals.setdefault(name, []).append(best)
    families = [
        make_family(
            trial.reader,
            own,
            trial.split,
            rivals={
                name: Baseline.strongest([best[at] for best in each])
                for name, each in rivals.items()
            },
            contrast=contrasts[at],
        )
        for at, (trial, own) in enumerate(zip(trials, seen, strict=True))
    ]
    return families, seen[0].heads, _readings(trials[0], rivals)


def _readings(trial: _Trial, rivals: Mapping[str, Sequence[Any]]) -> str:
    """What the nulls cost."""
    each = ["the model's own"]
    each += [f"{len(models)} with {name} weights" for name, models in rivals.items()]
    each += ["one of shuffled words"] if trial.apart is not None else []
    total = 1 + sum(map(len, rivals.values())) + (trial.apart is not None)
    count = "1 reading" if total == 1 else f"{total} readings"
    return f"{count} of the texts, about equally long: {', '.join(each)}"


def _rows(heads: Sequence[Head], family: Family, verdict: Verdict) -> pd.DataFrame:
    """A row per role and head."""
    R, N = len(family.roles), len(heads)
    bar = np.repeat([role.bar for role in family.roles], N)
    points = np.repeat([role.points for role in family.roles], N)
    found = verdict.p < LEVEL
    for effect in (family.chosen_half, verdict.effect):  # a head is chosen before it is judged
        gain = effect - verdict.baseline
        found &= (lift(effect, verdict.baseline) >= bar) & (gain >= points)
    said = np.array([family.says[name] for name in NULLS])  # nulls x roles
    null = [
        said[at, column // N] if at >= 0 else "" for column, at in enumerate(verdict.null.tolist())
    ]
    columns: dict[str, Any] = {
        "name": [str(head) for head in heads] * R,
        "stack": [head.stack for head in heads] * R,
        "layer": [head.layer for head in heads] * R,
        "head": [head.head for head in heads] * R,
        "role": np.repeat([role.name for role in family.roles], N),
        "found": found,
        "outcome": outcomes(found, verdict.p, verdict.texts),
        "effect": verdict.effect,
        "null": null,
        "baseline": verdict.baseline,
        "lift": verdict.lift,
        "ci_low": verdict.low,
        "ci_high": verdict.high,
        "mass": family.mass,
        "value": family.share,
        "n": verdict.n,
        "texts": verdict.texts,
        "p_adj": verdict.p,
        "split": "held-out",
        "chosen_half": family.chosen_half,
    }
    columns |= {f"null.{name}": rates for name, rates in zip(NULLS, verdict.rates, strict=True)}
    return pd.DataFrame(columns)


def _examples(
    rows: pd.DataFrame, family: Family, heads: Sequence[Head], texts: Sequence[str]
) -> dict[str, list[tuple[str, float, int]]]:
    """Held-out texts where heads show their roles most, then those where they show them least."""
    shown: dict[str, list[tuple[str, float, int]]] = {}
    columns = len(family.roles) * len(heads)  # the others are of random sequences
    for column in np.flatnonzero(rows["found"][:columns]):
        count = family.scored.count[:, column]
        asked = np.flatnonzero(count)
        rate = family.scored.value[asked, column] / count[asked]
        order = asked[np.lexsort((-count[asked], -rate))]
        chosen = dict.fromkeys([*order[:_SHOWN], *order[-_SHOWN:]])
        shown[f"{rows['name'][column]} {rows['role'][column]}"] = [
            (
                texts[at][:_LONGEST],
                float(family.scored.value[at, column] / count[at]),
                int(count[at]),
            )
            for at in chosen
        ]
    return shown
