"""Evaluates how well a Mini-GPT conjugates and translates unseen pairs of pronoun and verb."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from headwise._evaluation import in_evaluation
from headwise.corpora import BOS, EOS, PAD, Grammar, Line, relations
from headwise.lab._model import MiniGPT, encode_lines, number_of

if TYPE_CHECKING:
    import tokenizers

# Only these pronouns are held out, so only clauses with them are evaluated.
_HELD_OUT_SUBJECTS = ("he", "she", "y'all", "they")


@dataclass(frozen=True)
class EvaluationScores:
    """Next-token loss in nats and exact-match accuracies, from 0 to 1; NaN without any example.

    Attributes:
        loss: Mean over all tokens. It cannot reach 0, because the next pronoun is random.
        conjugation: The share of English verb forms predicted as the most likely next word, for
            verbs that occurred earlier in the line with the subject he, she, y'all or they.
        translation: The share of Spanish lines that greedy decoding gets completely right.
        conjugation_with_adverb: `conjugation` of forms separated from the subject by an adverb.
        translation_with_adverb: `translation` of lines that contain an adverb.
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
        held_out: Scores on pairs of verb and pronoun that do not occur in training.
        seen: Scores on lines drawn as in training.
        copying: The share of words predicted in the repetition of a sequence.
        lines: The number of evaluated lines of each kind.
    """

    held_out: EvaluationScores
    seen: EvaluationScores
    copying: float
    lines: int


def evaluate(
    model: MiniGPT,
    grammar: Grammar,
    *,
    tokenizer: "tokenizers.Tokenizer",
    lines: int = 512,
    seed: int = 0,
) -> Evaluation:
    """Evaluate a model on fresh lines of its grammar.

    Args:
        lines: The number of lines of each kind.
        seed: The seed of the lines; its draws differ from those of training.
    """
    rng = np.random.default_rng([seed, 1])
    unseen = [grammar.sentence(rng, held_out=True) for _ in range(lines)]
    seen = [grammar.sentence(rng) for _ in range(lines)]
    repeats = [grammar.repeat(rng) for _ in range(lines)]
    return Evaluation(
        held_out=_scores(model, tokenizer, grammar, unseen, held_out=True),
        seen=_scores(model, tokenizer, grammar, seen, held_out=False),
        copying=_copying(model, tokenizer, repeats),
        lines=lines,
    )


def _scores(
    model: MiniGPT,
    tokenizer: "tokenizers.Tokenizer",
    grammar: Grammar,
    lines: Sequence[Line],
    held_out: bool,
) -> EvaluationScores:
    loss, right = _predict(model, tokenizer, lines)
    forms: list[tuple[bool, bool]] = []  # (with an adverb, right)
    translations: list[tuple[bool, bool]] = []
    for line, hits in zip(lines, right, strict=True):
        words = (BOS, *line.words, EOS)
        equals = words.index("=")
        pairs = relations(words)
        queries = [
            (before, subject)
            for before, subject in pairs["next subject"]
            if 1 < subject < equals and words[subject] in _HELD_OUT_SUBJECTS
        ]
        forms += [
            (before > subject, bool(hits[before]))
            for before, subject in queries
            if ((line.verb, words[subject]) in grammar.held_out) == held_out
        ]
        # Greedy decoding produces the line exactly if every word is the most likely one after
        # the correct words before it, so a single pass evaluates the whole line.
        whole = bool(hits[equals : len(words) - 1].all())
        adverb = any(before > subject for before, subject in pairs["next subject"])
        translations.append((adverb, whole))
    return EvaluationScores(loss, *_shares(forms), *_shares(translations))


def _shares(results: Sequence[tuple[bool, bool]]) -> tuple[float, float, float]:
    """The accuracies over all examples, over those with an adverb and over those without."""
    groups = (
        [right for _, right in results],
        [right for adverb, right in results if adverb],
        [right for adverb, right in results if not adverb],
    )
    overall, with_adverb, without = (
        sum(group) / len(group) if group else float("nan") for group in groups
    )
    return overall, with_adverb, without


def _copying(model: MiniGPT, tokenizer: "tokenizers.Tokenizer", lines: Sequence[Line]) -> float:
    _, right = _predict(model, tokenizer, lines)
    hits: list[bool] = []
    for line, row in zip(lines, right, strict=True):
        words = (BOS, *line.words)
        # The last word is followed by <eos>, which no earlier copy predicts.
        copies = {query for query, _ in relations(words)["earlier copy"]}
        hits += [bool(row[query]) for query in copies if query < len(words) - 1]
    return sum(hits) / len(hits)


@torch.no_grad()
def _predict(
    model: MiniGPT, tokenizer: "tokenizers.Tokenizer", lines: Sequence[Line]
) -> tuple[float, Bool[Tensor, "B T"]]:
    """The mean loss, and for every token whether the next one is predicted correctly."""
    ids = encode_lines(tokenizer, lines)
    with in_evaluation(model):
        logits, targets = model(ids[:, :-1]), ids[:, 1:]
    loss = next_token_loss(logits, targets, number_of(tokenizer, PAD))
    return loss.item(), logits.argmax(-1) == targets


def next_token_loss(logits: Tensor, targets: Int[Tensor, "B T"], padding: int) -> Tensor:
    """Mean cross-entropy in nats over the targets that are not padding."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=padding)
