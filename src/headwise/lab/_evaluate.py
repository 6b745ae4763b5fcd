"""How well a Mini-GPT conjugates and translates verbs beside pronouns it never saw them with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from headwise._evaluation import in_evaluation
from headwise.corpora import BOS, EOS, PAD, Grammar, Line
from headwise.lab._data import encode_lines, number_of
from headwise.lab._model import MiniGPT

# Only these pronouns are held out, so only clauses with them are compared.
_JUDGED = ("he", "she", "y'all", "they")


@dataclass(frozen=True)
class EvaluationScores:
    """Next-token loss in nats and exact-match shares, from 0 to 1; NaN where nothing was asked.

    Attributes:
        loss: Over all tokens. It cannot reach 0: nobody can know which pronoun comes next.
        conjugation: English verb forms that are the likeliest next word, where the verb was
            seen earlier in the line and the subject is he, she, y'all or they.
        translation: Spanish lines that greedy decoding gets right from the first word to the
            last.
        conjugation_with_adverb: Of the forms that an adverb parts from their subject.
        translation_with_adverb: Of the lines that have an adverb somewhere.
    """

    loss: float
    conjugation: float
    conjugation_with_adverb: float
    conjugation_without_adverb: float
    translation: float
    translation_with_adverb: float
    translation_without_adverb: float


@dataclass(frozen=True)
class Evaluation:
    """Scores on fresh lines.

    Attributes:
        held_out: On lines with a verb and a pronoun that never met in training.
        seen: On lines drawn as in training.
        copying: Share of the words of a repeated sequence that are predicted.
        lines: How many lines of each kind were judged.
    """

    held_out: EvaluationScores
    seen: EvaluationScores
    copying: float
    lines: int


def evaluate(
    model: MiniGPT, tokenizer: Tokenizer, grammar: Grammar, *, lines: int = 512, seed: int = 0
) -> Evaluation:
    """Judge a model on fresh lines of its grammar.

    Args:
        lines: How many lines of each kind to draw.
        seed: Of the draws, which share nothing with those of training.
    """
    rng = np.random.default_rng([seed, 1])
    unseen = [grammar.sentence(rng, held_out=True) for _ in range(lines)]
    seen = [grammar.sentence(rng) for _ in range(lines)]
    repeats = [grammar.repeat(rng) for _ in range(lines)]
    return Evaluation(
        held_out=_scores(model, tokenizer, grammar, unseen, held_out=True),
        seen=_scores(model, tokenizer, grammar, seen, held_out=False),
        copying=_copying(model, tokenizer, grammar, repeats),
        lines=lines,
    )


def _scores(
    model: MiniGPT, tokenizer: Tokenizer, grammar: Grammar, lines: Sequence[Line], held_out: bool
) -> EvaluationScores:
    loss, right = _predict(model, tokenizer, lines)
    forms: list[tuple[bool, bool]] = []  # (with an adverb, right)
    translations: list[tuple[bool, bool]] = []
    for line, hits in zip(lines, right, strict=True):
        words = (BOS, *line.words, EOS)
        equals = words.index("=")
        relations = grammar.relations(words)
        queries = [
            (before, subject)
            for before, subject in relations["next subject"]
            if 1 < subject < equals and words[subject] in _JUDGED
        ]
        forms += [
            (before > subject, bool(hits[before]))
            for before, subject in queries
            if ((line.verb, words[subject]) in grammar.held_out) == held_out
        ]
        # Greedy decoding writes the whole line exactly if every word, after the right words
        # before it, is the likeliest: so one pass judges what would take one per word.
        whole = bool(hits[equals : len(words) - 1].all())
        adverb = any(before > subject for before, subject in relations["next subject"])
        translations.append((adverb, whole))
    return EvaluationScores(loss, *_shares(forms), *_shares(translations))


def _shares(results: Sequence[tuple[bool, bool]]) -> tuple[float, float, float]:
    """Shares that are right: of all, with an adverb, without one."""
    groups = (
        [right for _, right in results],
        [right for adverb, right in results if adverb],
        [right for adverb, right in results if not adverb],
    )
    overall, with_adverb, without = (
        sum(group) / len(group) if group else float("nan") for group in groups
    )
    return overall, with_adverb, without


def _copying(
    model: MiniGPT, tokenizer: Tokenizer, grammar: Grammar, lines: Sequence[Line]
) -> float:
    _, right = _predict(model, tokenizer, lines)
    hits: list[bool] = []
    for line, row in zip(lines, right, strict=True):
        words = (BOS, *line.words)
        # The last word is followed by <eos>, which no earlier copy foretells.
        copies = {query for query, _ in grammar.relations(words)["earlier copy"]}
        hits += [bool(row[query]) for query in copies if query < len(words) - 1]
    return sum(hits) / len(hits)


@torch.no_grad()
def _predict(
    model: MiniGPT, tokenizer: Tokenizer, lines: Sequence[Line]
) -> tuple[float, Bool[Tensor, "B T"]]:
    """The mean loss, and for every token whether the one after it is the likeliest."""
    ids = encode_lines(tokenizer, lines)
    with in_evaluation(model):
        logits, targets = model(ids[:, :-1]), ids[:, 1:]
    loss = next_token_loss(logits, targets, number_of(tokenizer, PAD))
    return loss.item(), logits.argmax(-1) == targets


def next_token_loss(logits: Tensor, targets: Int[Tensor, "B T"], padding: int) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not padding."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=padding)
