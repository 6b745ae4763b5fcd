"""Find out what each head does: read, compare with nulls, judge as one family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from torch import nn

from headwise.corpora import AnnotatedText
from headwise.errors import ArgumentError, InputError
from headwise.heads import Head
from headwise.models import context_of, fingerprint
from headwise.roles._evidence import FEWEST_TEXTS, Verdict, halves, judge
from headwise.roles._families import Family, make_family
from headwise.roles._measure import Measured, Progress, measure, permuted
from headwise.roles._table import LEVEL, NULLS, Roles
from headwise.roles.relations import (
    PROBED,
    Item,
    Pairs,
    Role,
    Tokenized,
    TokenText,
    as_item,
    gold_roles,
    probe,
    token_roles,
    tokenize,
)

_SEQUENCES = 100  # of random tokens
_SHOWN = 3  # texts where a role is strongest, and as many where it fails
_LONGEST = 200  # characters of a text that are shown


def find_roles(
    model: nn.Module,
    tokenizer: Any,
    corpus: Sequence[str | AnnotatedText],
    *,
    relations: Mapping[str, Callable[[TokenText], Pairs]] | None = None,
    null_models: int = 1,
    max_tokens: int | None = None,
    seed: int = 0,
    on_text: Progress | None = None,
) -> Roles:
    """Find out what each head does, with evidence that would stand up.

    A head has a role if, on texts that nothing was chosen on, it does better than every null
    that applies: chance, the best fixed offset, the nearest word of a class, the best head of
    the same model with permuted weights, and for repetition the same positions without any.
    Better means by a lift of .25 (.10 for trees) and with p < .05, adjusted over all heads and
    roles together. Attending is not doing: a role says what a head looks at, not what for.

    The model reads every distinct text once, as many sequences of random tokens and their
    controls, and all of them again for each null model. Weights are made for one layer of one
    batch at a time. A text longer than the model reads is cut at sentence ends.

    Args:
        model: Any model that takes `input_ids` and `attention_mask`.
        tokenizer: Its tokenizer, one that says where its tokens stand (a fast one).
        corpus: Texts, with or without annotations; trees, mentions and links add their roles.
        relations: Roles of your own, by name: from a text to its pairs of tokens (query, key).
        null_models: How many copies of the model with permuted weights to hold it against.
            Each costs another reading of everything.
        max_tokens: The most tokens in one text. None is what the model can read.
        seed: Decides the halves, the sequences, the permutations and all draws.
        on_text: Told after each batch how many texts are done, of how many.
    Returns:
        A row per head and role, found or not.
    Raises:
        ArgumentError: `null_models` is negative, or a role is given twice.
        InputError: there is no text with a token.
        UnsupportedError: the model cannot be watched exactly, the tokenizer does not say where
            its tokens stand, or there is no weight matrix to permute.
    """
    if null_models < 0:
        raise ArgumentError(f"find_roles: null_models={null_models}. Give 0 or more.")
    texts = list({_annotated(one): None for one in corpus})
    limit = context_of(model, tokenizer)
    limit = limit if max_tokens is None else min(limit, max_tokens)
    tokenized = tokenize(tokenizer, texts, limit)
    if not tokenized.pieces:
        raise InputError(f"find_roles: {len(texts)} texts hold no token. Give texts with words.")
    question = _ask_about(tokenized, texts, relations or {}, limit, seed)
    seen = question.put_to(model, on_text)
    nulls = [question.put_to(permuted(model, seed + at), on_text) for at in range(null_models)]
    families = question.families(seen, nulls)
    verdicts = judge([family.scored for family in families], seed=seed)
    rows = pd.concat(
        [
            _rows(seen.text.heads, family, verdict)
            for family, verdict in zip(families, verdicts, strict=True)
        ],
        ignore_index=True,
    )
    return Roles(
        rows=rows,
        meanings={role.name: role.says for family in families for role in family.roles},
        notes=question.notes(len(corpus), null_models),
        texts=_examples(rows, families[0], seen.text.heads, question.held_texts()),
        model=fingerprint(model),
        versions={name: version(name) for name in ("headwise", "torch")},
    )


def _annotated(text: str | AnnotatedText) -> AnnotatedText:
    return AnnotatedText(text) if isinstance(text, str) else text


@dataclass(frozen=True)
class _Seen:
    """What one model showed: on the texts, on repeated sequences, and on their controls."""

    text: Measured
    repeated: Measured | None
    control: Measured | None


@dataclass(frozen=True)
class _Question:
    """What every model is asked, the watched one and the null ones alike."""

    tokenized: Tokenized
    texts: Sequence[AnnotatedText]
    roles: Sequence[Role]
    items: Sequence[Item]
    repeated: Sequence[Item]
    controls: Sequence[Item]
    seed: int

    def put_to(self, model: nn.Module, on_text: Progress | None) -> _Seen:
        text = measure(model, self.items, self.roles, self._tags, on_text)
        if not self.repeated:
            return _Seen(text, None, None)
        return _Seen(
            text,
            measure(model, self.repeated, PROBED, (), on_text),
            measure(model, self.controls, PROBED, (), on_text),
        )

    def families(self, seen: _Seen, nulls: Sequence[_Seen]) -> list[Family]:
        of_text = {text: at for at, text in enumerate(self.texts)}
        owner = np.array([of_text[piece.text] for piece in self.tokenized.pieces])
        plain = [one.text for one in nulls]
        found = [make_family(seen.text, plain, None, owner, self._chosen, self._tags)]
        if seen.repeated is not None:
            theirs = [one.repeated for one in nulls if one.repeated is not None]
            each = np.arange(len(self.repeated))
            chosen = halves(len(each), self.seed)
            found.append(make_family(seen.repeated, theirs, seen.control, each, chosen, ()))
        return found

    def held_texts(self) -> list[str]:
        """The texts that nothing was chosen on."""
        return [
            text.text for text, chosen in zip(self.texts, self._chosen, strict=True) if not chosen
        ]

    def notes(self, given: int, null_models: int) -> tuple[str, ...]:
        held, split = len(self.held_texts()), self.tokenized
        notes = [
            f"{len(self.texts)} distinct texts of {given}; rules and null heads chosen on "
            f"{len(self.texts) - held}, all numbers from the other {held}",
            f"{len(self.repeated)} sequences of random tokens that repeat, and as many controls",
            f"{null_models} copies with permuted weights, each as long as the reading itself",
        ]
        if split.cut_at_sentences or split.cut_within:
            notes.append(
                f"{split.cut_at_sentences} texts were longer than the model reads and cut between "
                f"sentences, {split.cut_within} within one"
            )
        if held < FEWEST_TEXTS:
            notes.append(f"no role of text can be found: {held} held-out texts, not {FEWEST_TEXTS}")
        if not self.repeated:
            notes.append("too few different tokens, or too short a context, for sequences")
        return tuple(notes)

    @property
    def _tags(self) -> list[str]:
        return sorted({tag for text in self.texts for tag in text.tags} - {"_"})

    @property
    def _chosen(self) -> Bool[np.ndarray, " M"]:
        return halves(len(self.texts), self.seed)


def _ask_about(
    tokenized: Tokenized,
    texts: Sequence[AnnotatedText],
    relations: Mapping[str, Callable[[TokenText], Pairs]],
    limit: int,
    seed: int,
) -> _Question:
    pieces = tokenized.pieces
    roles = [*token_roles(pieces), *gold_roles(pieces)]
    roles += [Role(name, f"your relation {name}", pairs) for name, pairs in relations.items()]
    names = [role.name for role in (*roles, *PROBED)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"find_roles: {twice[0]!r} is a role already. Rename yours.")
    items = [as_item(piece, roles) for piece in pieces]
    repeated, controls = probe(pieces, limit, _SEQUENCES, seed)
    return _Question(tokenized, texts, roles, items, repeated, controls, seed)


def _rows(heads: Sequence[Head], family: Family, verdict: Verdict) -> pd.DataFrame:
    """A row per role and head."""
    R, N = len(family.roles), len(heads)
    bar = np.repeat([role.bar for role in family.roles], N)
    with np.errstate(invalid="ignore"):  # a row without queries is no discovery
        found = (verdict.lift >= bar) & (verdict.p < LEVEL)
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
        "effect": verdict.effect,
        "null": null,
        "baseline": verdict.baseline,
        "lift": verdict.lift,
        "ci_low": verdict.low,
        "ci_high": verdict.high,
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
