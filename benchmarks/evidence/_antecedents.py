"""Antecedents that heads choose in paragraphs of GAP, beside rules (Clark et al. 2019, 4.3)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from benchmarks._report import table
from benchmarks.evidence._coreference import Paragraph, Query, choices, genders, paragraph
from benchmarks.evidence._word_attention import between_words, weights_of
from headwise.corpora import AnnotatedText
from headwise.models.texts import token_offsets
from headwise.roles import step_down

THEIRS = ("nearest", "same head word", "sieve")
OTHERS = ("nearest before", "first", "most repeated", "most named before")
AMONG = {True: "the two annotated mentions", False: "all names and the pronoun"}
KINDS = {True: "the pronoun", False: "its name"}


def antecedents(
    model: nn.Module, tokenizer: Any, texts: Sequence[AnnotatedText], length: int
) -> dict[str, Any]:
    """For each mention with an antecedent: whether each head and each rule chooses one.

    Paragraphs are cut after `length` tokens; what lies beyond is no mention. Rules learn genders
    from the other half of the paragraphs.
    """
    paragraphs = [paragraph(text) for text in texts]
    known = [genders(paragraphs[1 - half :: 2]) for half in (0, 1)]
    encoded = token_offsets(tokenizer, [text.text for text in texts])
    last = [one.ids[-1] for one in encoded]
    ids = [
        list(one.ids if len(one.ids) <= length else (*one.ids[: length - 1], end))
        for one, end in zip(encoded, last, strict=True)
    ]
    rows, names = [], []
    for number, (heads, weights) in enumerate(weights_of(model, ids)):
        names = [str(head) for head in heads]
        where = paragraphs[number]
        words = [
            [token for token in encoded[number].tokens_in(where.text, span) if token < length - 1]
            for span in where.spans
        ]
        attention = between_words(weights, words)
        for annotated in AMONG:
            for query in queries(where, annotated, words):
                rows.append(
                    {
                        "paragraph": number,
                        "annotated": annotated,
                        "pronoun": query.mention.pronoun,
                        "chance": float(np.mean(query.right)),
                        "rules": {
                            name: query.is_right(chosen)
                            for name, chosen in choices(where, query, known[number % 2]).items()
                        },
                        "heads": chosen_by_heads(attention, query),
                        "words": among_words(attention, query),
                    }
                )
    return {"heads": names, "rows": rows, "paragraphs": len(texts)}


def queries(where: Paragraph, annotated: bool, words: Sequence[Sequence[int]]) -> Iterator[Query]:
    """The queries of a paragraph among mentions whose head word has tokens."""
    for query in where.queries(annotated):
        read = tuple(name for name in query.candidates if words[name.head])
        left = Query(query.mention, read)
        if words[query.mention.head] and any(left.right):
            yield left


def chosen_by_heads(attention: np.ndarray, query: Query) -> str:
    """A digit for each head: whether the candidate with the largest weight is an antecedent."""
    weights = attention[:, query.mention.head, [name.head for name in query.candidates]]
    return digits(np.array(query.right)[weights.argmax(1)])


def among_words(attention: np.ndarray, query: Query) -> str:
    """The same among all words of the text."""
    right = [name.head for name in query.candidates if query.is_right(name)]
    return digits(np.isin(attention[:, query.mention.head].argmax(1), right))


def digits(hits: np.ndarray) -> str:
    return "".join(str(int(hit)) for hit in hits)


def antecedent_lines(content: Any) -> list[str]:
    rows, ours = [], []
    for annotated, among in AMONG.items():
        for pronoun, kind in KINDS.items():
            part = [
                row
                for row in content["rows"]
                if row["annotated"] == annotated and row["pronoun"] == pronoun
            ]
            theirs, beside = rows_of(part, content["heads"])
            rows.append([f"{kind}, among {among}", *theirs])
            ours.append([f"{kind}, among {among}", *beside])
    return [
        f"{content['paragraphs']:,} paragraphs; by their rule, all of it on the same paragraphs:",
        table(["mention", "queries", "chance", *THEIRS, "best head", "accuracy",
               "heads above all three", "best among all words"], rows),
        "By ours: rule and head chosen on one half of the paragraphs and scored on the other, in "
        "both ways; heads whose gain over that rule has p < .05 on both halves, adjusted over all "
        "heads:",
        table(["mention", *OTHERS, "rule", "head", "held out: head · rule", "gain", "p",
               "heads above the rule"], ours),
    ]  # fmt: skip


def rows_of(part: Sequence[Any], heads: Sequence[str]) -> tuple[list[str], list[str]]:
    """What their rule states about these queries, and what ours adds."""
    hits = np.array([[int(digit) for digit in row["heads"]] for row in part])
    words = np.array([[int(digit) for digit in row["words"]] for row in part])
    rules = {name: np.array([row["rules"][name] for row in part]) for name in (*THEIRS, *OTHERS)}
    rates, bar = hits.mean(0), max(rules[name].mean() for name in THEIRS)
    best = rates.argmax()
    theirs = [
        f"{len(part):,}", f"{np.mean([row['chance'] for row in part]):.3f}",
        *(f"{rules[name].mean():.3f}" for name in THEIRS), heads[best], f"{rates[best]:.3f}",
        f"{(rates > bar).sum()} of {len(heads)}",
        f"{heads[words.mean(0).argmax()]}, {words.mean(0).max():.3f}",
    ]  # fmt: skip
    texts = np.array([row["paragraph"] for row in part])
    found = [held_out(hits, rules, texts, half) for half in (0, 1)]
    names = dict.fromkeys(one["rule"] for one in found)
    best_heads = dict.fromkeys(heads[one["chosen"]] for one in found)
    above = np.logical_and(*(one["p"] < 0.05 for one in found))
    who = ", ".join(np.array(heads)[above]) or "none"
    head, rule = (np.mean([one[key] for one in found]) for key in ("head", "bar"))
    ours = [
        *(f"{rules[name].mean():.3f}" for name in OTHERS), ", ".join(names), ", ".join(best_heads),
        f"{head:.3f} · {rule:.3f}", f"{head - rule:+.3f}",
        f"{max(one['p'][one['chosen']] for one in found):.2g}", who,
    ]  # fmt: skip
    return theirs, ours


def held_out(
    hits: np.ndarray, rules: dict[str, np.ndarray], texts: np.ndarray, half: int
) -> dict[str, Any]:
    """The head and the rule that are best on one half of the texts, on the other half.

    p is of the gain of each head over the rule, adjusted over all heads.
    """
    chosen_on = texts % 2 == half
    rule = max(rules, key=lambda name: rules[name][chosen_on].mean())
    head = int(hits[chosen_on].mean(0).argmax())
    fresh, bar = hits[~chosen_on], rules[rule][~chosen_on]
    gains = sums_of(fresh - bar[:, None].astype(float), texts[~chosen_on])
    worst = np.full(hits.shape[1], -1.0)
    p = step_down([gains.astype(np.float32)], [worst])[0]
    return {
        "rule": rule, "chosen": head, "head": fresh[:, head].mean(), "bar": bar.mean(), "p": p,
    }  # fmt: skip


def sums_of(values: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """The sum over the queries of each text."""
    _, place = np.unique(texts, return_inverse=True)
    sums = np.zeros((place.max() + 1, values.shape[1]))
    np.add.at(sums, place, values)
    return sums
