"""Curves agree with `ablate`, and with a small case computed by hand."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn

from headwise import prune
from headwise.corpora import SentencePair
from headwise.models import ablate
from headwise.scoring import embedding, paired, prune_curves
from headwise.tables import Curves, Elbow, Head, random_orders, removable
from oracles import padded
from strategies import seeds

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
HEADS = [Head("", layer, head) for layer in range(2) for head in range(zoo.HEADS)]


@pytest.mark.parametrize("mean", [True, False])
def test_a_point_is_the_loss_with_those_heads_ablated(mean: bool) -> None:
    model = zoo.make("Bert")
    batch, reference = (
        {"input_ids": padded(texts, "right")["input_ids"]} for texts in (TEXTS, [[7, 8, 2]])
    )
    orders = random_orders(HEADS, 2)
    curves = prune_curves(
        model,
        [batch],
        {"random": orders},
        reference=[reference] if mean else None,
        points=[1, 4, 99],
    )
    assert curves.removed.tolist() == [0, 1, 4]  # of 8 heads, a layer keeps one
    loss = embedding()
    options = ("mean", [reference]) if mean else ("zero", None)
    with torch.no_grad():
        full = loss.of(model(**batch), batch)
        for order, values in zip(orders, curves.per_text["random"], strict=True):
            for number, losses in zip(curves.removed, values, strict=True):
                removed = removable(order)[:number]
                with ablate(model, removed, *options):
                    expected = loss.per_text(model(**batch), batch, full).numpy()
                np.testing.assert_allclose(losses, expected, atol=1e-6)


@given(seed=seeds, heads=st.integers(1, 12))
def test_each_layer_keeps_its_last_head(seed: int, heads: int) -> None:
    [order] = random_orders([Head("", head % 3, head) for head in range(heads)], 1, seed)
    removed = removable(order)
    assert removed == [head for head in order if head in removed]
    remaining = [head for head in order if head not in removed]
    assert sorted({head.layer for head in order}) == sorted(head.layer for head in remaining)
    for head, following in pairwise(order):  # the remaining head is the last of its layer
        assert head not in remaining or head.layer != following.layer


def _curves() -> Curves:
    rising = np.array([[0.0, 0.0], [0.25, 0.75], [1.0, 2.0]])
    return Curves(
        np.array([0, 2, 5]), 10, {"one": rising[None], "random": np.stack([rising, 3 * rising])}
    )


def test_removable_heads_end_at_the_last_point_below_the_allowance() -> None:
    curves = _curves()
    assert curves.removable("one", 0.6) == 2
    assert curves.removable("one", 0.5) == 0  # a loss equal to the allowance is not below it
    assert curves.removable("one", 9.0) == 5
    assert curves.removable("random", 1.6) == 3  # the median of 5 and 2, whole heads
    np.testing.assert_allclose(curves.mean("random"), [[0.0, 0.5, 1.5], [0.0, 1.5, 4.5]])


def test_a_curve_that_recovers_counts_up_to_its_first_crossing() -> None:
    values = np.array([[[0.0], [1.0], [0.1]]])
    assert Curves(np.array([0, 1, 2]), 4, {"one": values}).removable("one", 0.5) == 0


def test_the_elbow_of_a_small_case() -> None:
    # Two texts: a quarter of all draws takes the first twice, a quarter the second twice.
    curves = _curves()
    assert curves.elbow("one", 0.6) == Elbow(2, 0.0, 2.0, 5)  # 0.25 and 0.75 of the two at 2 heads
    assert curves.elbow("one", 9.0) == Elbow(5, 5.0, 5.0, 5)
    assert curves.elbow("random", 1.6) == Elbow(3, 0.0, 5.0, 5)
    elbow = Curves(np.array([0, 1]), 4, {"one": np.zeros((1, 2, 1))}).elbow("one", 0.1)
    assert elbow.heads == 1
    assert np.isnan([elbow.low, elbow.high]).all()


def test_the_interval_of_the_elbow_covers_as_often_as_it_says() -> None:
    # A text loses k times a draw of mean 1 without k heads: 9 heads stay below 9.5.
    rng = np.random.default_rng(0)
    points, covered = np.arange(15), 0
    for _ in range(200):
        texts = rng.exponential(1.0, 80)
        base = rng.random(80)  # differences that all texts share do not count
        curves = Curves(points, 20, {"one": (base + points[:, None] * texts)[None]})
        elbow = curves.elbow("one", 9.5)
        assert elbow.low <= elbow.heads <= elbow.high
        covered += elbow.low <= 9 <= elbow.high
    assert covered >= 180


def test_the_allowance_is_a_share_of_the_loss_of_the_whole_model() -> None:
    values = np.array([[[2.0, 4.0], [5.0, 6.0]]])
    assert Curves(np.array([0, 1]), 4, {"one": values}).allowance() == pytest.approx(0.03)
    embedding_curves = Curves(np.array([0, 1]), 4, {"one": values}, compares=True)
    assert embedding_curves.allowance(0.02) == 0.02


def test_random_orders_are_added() -> None:
    model, batch = zoo.make("Bert"), {"input_ids": padded(TEXTS, "right")["input_ids"]}
    curves = prune_curves(model, [batch], {"mine": [HEADS]})
    assert curves.removed.tolist() == [0, 1, 2, 3, 4, 5, 6]
    explicit = prune_curves(model, [batch], {"mine": [HEADS], "drawn": random_orders(HEADS, 5)})
    assert list(explicit.per_text) == ["mine", "drawn"]
    np.testing.assert_array_equal(curves.per_text["mine"], explicit.per_text["mine"])
    np.testing.assert_array_equal(curves.per_text["random"], explicit.per_text["drawn"])


def test_pruned_models_are_measured_themselves() -> None:
    model, batch = zoo.make("Llama"), padded(TEXTS, "right")
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    order = [Head("", *pair) for pair in [(0, 0), (1, 2), (0, 1), (1, 3)]]  # whole groups first
    order += [head for head in HEADS if head not in order]
    calls = []

    def cut(removed: list[Head]) -> nn.Module:
        calls.append(removed)
        return prune(model, removed, expand=True).train()

    gated = prune_curves(model, [batch], {"mine": [order]}, points=[2, 4])
    cuts = prune_curves(model, [batch], {"mine": [order]}, points=[2, 4], cut=cut)
    assert [len(removed) for removed in calls] == [2, 4]
    assert list(cuts.per_text) == ["mine"]
    np.testing.assert_allclose(cuts.per_text["mine"], gated.per_text["mine"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "labels", "score"),
    [
        ({"num_labels": 3}, [2, 0, 1], "accuracy"),
        ({"num_labels": 1}, [0.5, 2.0, -1.0], "spearman"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"},
         [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], "accuracy"),
    ],
)  # fmt: skip
def test_labels_give_the_task_score(options: Any, labels: Any, score: str) -> None:
    config = zoo.make("Bert").config
    config = type(config)(**{**config.to_dict(), "id2label": None, "label2id": None} | options)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = padded(TEXTS, "right") | {"labels": torch.tensor(labels)}
    batch.pop("position_ids", None)
    curves = prune_curves(model, [batch], {"mine": [HEADS]}, points=[3])
    assert (curves.loss, curves.score) == ("label", score)
    for point, number in enumerate(curves.removed):
        with torch.no_grad(), ablate(model, removable(HEADS)[:number]):
            logits = model(**batch).logits
        if options["num_labels"] == 3:
            expected = (logits.argmax(1) == batch["labels"]).float().mean()
        elif options["num_labels"] == 2:
            expected = ((logits > 0) == batch["labels"].bool()).float().mean()
        else:
            expected = spearmanr(logits[:, 0], labels).statistic
        assert curves.scores["mine"][0, point] == pytest.approx(float(expected))
    frame = curves.frame()
    assert frame[score].tolist()[:2] == curves.scores["mine"][0].tolist()
    assert (frame[f"{score}.low"] <= frame[f"{score}.high"]).all()


def test_pairs_give_the_correlation_of_their_cosines() -> None:
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate("abcdefghij")}, "a")
    )
    tokenizer.pre_tokenizer = Whitespace()
    texts = ["a b c", "d", "e f g h", "b", "i j", "c c a b", "g", "a"]
    pairs = [
        SentencePair(first, second, similarity)
        for first, second, similarity in zip(
            texts, texts[::-1], [3.0, 1.0, 0.5, 2.0] * 2, strict=True
        )
    ][:5]
    model = zoo.make("Bert")
    batches, loss = paired(pairs, model, tokenizer)
    curves = prune_curves(model, batches, {"mine": [HEADS]}, loss=loss, points=[2])

    def embed(text: str) -> np.ndarray:
        ids = {"input_ids": torch.tensor([tokenizer.encode(text).ids])}
        return loss.of(model(**ids), ids)[0].numpy()

    for point, number in enumerate(curves.removed):
        with torch.no_grad(), ablate(model, removable(HEADS)[:number]):
            cosines = [embed(pair.one) @ embed(pair.two) for pair in pairs]
        expected = spearmanr(cosines, [pair.similarity for pair in pairs]).statistic
        assert curves.scores["mine"][0, point] == pytest.approx(expected)


def test_the_frame_has_the_elbow_with_an_allowance() -> None:
    frame = _curves().frame(allowed=0.6)
    rows = frame[frame["order"] == "one"]
    assert rows["elbow"].tolist() == [2, 2, 2]
    assert rows[["elbow.low", "elbow.high"]].drop_duplicates().to_numpy().tolist() == [[0.0, 2.0]]


def test_the_frame_has_a_row_for_each_point() -> None:
    frame = _curves().frame()
    assert frame["order"].tolist() == ["one"] * 3 + ["random"] * 3
    assert frame["share"].tolist() == [0.0, 0.2, 0.5] * 2
    band = frame[frame["order"] == "random"]
    assert band["low"].tolist() == [0.0, 0.5, 1.5]
    assert band["high"].tolist() == [0.0, 1.5, 4.5]
    rows = frame[frame["order"] == "one"]
    assert ((rows["low"] <= rows["loss"]) & (rows["loss"] <= rows["high"])).all()
