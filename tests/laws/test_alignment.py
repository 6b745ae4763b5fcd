"""Heads as aligners: heads built by hand, under both conventions of alignment."""

import numpy as np
import pytest

from headwise.corpora import AnnotatedText, Grammar, annotate
from headwise.errors import InputError
from headwise.roles import alignment
from planted import TOKENIZER, Planted


def linked(n: int, links: tuple[tuple[int, int], ...], seed: int = 0) -> list[AnnotatedText]:
    """Texts of eight words; the last four translate the first four."""
    rng = np.random.default_rng(seed)
    spans = tuple((3 * index, 3 * index + 2) for index in range(8))
    drawn = (" ".join(f"w{number}" for number in rng.choice(10, 8)) for _ in range(n))
    return [AnnotatedText(text, spans, links=links) for text in drawn]


STRAIGHT = tuple((4 + index, index) for index in range(4))
HEADS = [("offset -4", "offset -3", "offset +0", "even")]


def rows(texts, layers=HEADS, causal=True):
    return alignment(Planted(layers, causal), TOKENIZER, texts).set_index(["query", "name"])


def test_each_convention_finds_its_head():
    scores = rows(linked(60, STRAIGHT))
    accuracy = scores["accuracy"]
    assert accuracy["identity", "L0.H0"] == pytest.approx(1.0)
    # The token before the target is one position nearer to the source.
    assert accuracy["prediction", "L0.H1"] == pytest.approx(1.0)
    assert accuracy["prediction", "L0.H0"] < 0.5
    assert accuracy["identity", "L0.H1"] < 0.5
    assert scores.loc[("identity", "L0.H0"), "aer"] == pytest.approx(0.0)


def test_the_other_direction_is_a_row_of_its_own_where_it_can_be_asked():
    shifted = tuple((4 + index, (index + 1) % 4) for index in range(4))
    layers = [("offset +4", "offset -4", "offset +3", "even")]
    straight = rows(linked(60, STRAIGHT), layers, causal=False)["accuracy"]
    assert straight["source", "L0.H0"] == straight["identity", "L0.H1"] == pytest.approx(1.0)
    assert straight["source", "L0.H1"] < 0.5
    assert straight["identity", "L0.H0"] < 0.5
    # Three of four words have their translation three words on; the first has its own at the end.
    scores = rows(linked(60, shifted), layers, causal=False)
    aligned = scores.loc[("source", "L0.H2")]
    assert 0.75 <= aligned["accuracy"] < 0.9
    assert aligned["aer"] == pytest.approx(1 - aligned["accuracy"])
    even = scores.loc[("source", "L0.H3")]
    assert even["accuracy"] == even["chance"] == pytest.approx(0.25)
    assert (even["offset"], even["n"]) == (0.75, 4 * even["texts"])
    # A decoder cannot attend to what follows.
    assert set(rows(linked(60, STRAIGHT)).index.get_level_values("query")) == {
        "identity",
        "prediction",
    }


def test_a_source_with_two_translations_finds_either():
    links = ((4, 0), (5, 0), (6, 3))
    scores = rows(linked(60, links), [("offset +4", "offset +5")], causal=False)
    assert scores.loc["source", "n"].tolist() == [60, 60]  # two queries in each held-out text
    assert scores.loc[("source", "L0.H0"), "accuracy"] == pytest.approx(0.5)
    assert scores.loc[("source", "L0.H1"), "accuracy"] >= 0.5
    # Of three links each head predicts one: 1 − 2 · 1 / (2 + 3).
    assert scores.loc[("source", "L0.H0"), "aer"] == pytest.approx(1 - 2 / 5)


def test_ties_score_chance_and_heuristics_their_accuracy():
    scores = rows(linked(60, STRAIGHT))
    even = scores.loc[("identity", "L0.H3")]
    assert even["accuracy"] == pytest.approx(0.25)
    assert even["chance"] == pytest.approx(0.25)
    assert (scores["offset"] == 1.0).all()
    assert (scores["diagonal"] == 1.0).all()
    assert (even["n"], even["texts"]) == (4 * even["texts"], 30)


def test_an_offset_does_not_predict_reversed_words():
    scores = rows(linked(60, ((4, 3), (5, 2), (6, 1), (7, 0))))
    assert scores["diagonal"].iloc[0] == 0.0
    assert scores["offset"].iloc[0] == 0.25


def test_the_error_rate_counts_missed_links():
    # One word, two sources: one of two links is predicted: 1 − 2·1/(1 + 2).
    scores = rows(linked(60, ((4, 0), (4, 1))))
    assert scores.loc[("identity", "L0.H0"), "accuracy"] == pytest.approx(1.0)
    assert scores.loc[("identity", "L0.H0"), "aer"] == pytest.approx(1 / 3)


def test_an_encoder_aligns_texts_of_different_lengths():
    grammar, rng = Grammar(), np.random.default_rng(0)
    texts = [annotate(grammar.sentence(rng)) for _ in range(40)]
    # Foreign words are unknown to the tokenizer; their positions suffice.
    scores = rows([*texts, *linked(20, STRAIGHT)], [("offset -4", "even")], causal=False)
    assert scores["accuracy"].between(0, 1).all()
    assert (scores["ci_low"] <= scores["accuracy"]).all()
    assert scores.loc[("identity", "L0.H1"), "accuracy"] == pytest.approx(
        scores["chance"].iloc[0], abs=1e-6
    )


def test_texts_without_links():
    with pytest.raises(
        InputError, match=r"alignment: no word of 1 texts is linked with an earlier"
    ):
        alignment(Planted(HEADS, True), TOKENIZER, [AnnotatedText("w1 w2")])
