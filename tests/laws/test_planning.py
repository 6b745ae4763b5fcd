"""Plans meet their constraints: shares, budgets, equal groups, a head in each layer."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zoo
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import nn

from folders import tiny_t5, word_tokenizer
from headwise import Head, Plan, prune
from headwise.capture import capture_calls
from headwise.corpora import SentencePair
from headwise.counts import layer_sizes
from headwise.errors import ArgumentError
from headwise.ownership import ablate, find_attentions
from headwise.scoring import EMBEDDING, importance, paired, prune_curves
from headwise.surgery import Costs, PassTimes, _measure, costs, plan, removal_order, time_passes
from headwise.tables import Curves, Elbow, Scores, random_orders, removable
from oracles import modules_of, padded
from strategies import seeds


def _scores(seed: int, layers: int, groups: int, size: int, rounds: bool = False) -> Scores:
    rng = np.random.default_rng(seed)
    heads = [Head("", layer, head) for layer in range(layers) for head in range(groups * size)]
    return Scores(
        heads=tuple(heads),
        kv_heads=np.array([head.head // size for head in heads]),
        per_text=rng.random((3, len(heads))),
        rounds=rng.integers(0, 3, len(heads)) if rounds else None,
        method="ablation",
        loss="lm",
        model="abc",
    )


@given(
    seed=seeds,
    layers=st.integers(1, 4),
    groups=st.integers(2, 5),
    size=st.integers(1, 3),
    remove=st.floats(0.05, 0.95),
    uniform=st.booleans(),
)
def test_a_plan_removes_the_requested_share_and_keeps_groups_equal(
    seed: int, layers: int, groups: int, size: int, remove: float, uniform: bool
) -> None:
    scores = _scores(seed, layers, groups, size)
    total, step = len(scores.heads), size * (layers if uniform else 1)
    if remove * total < step - 1e-9 or remove * total > (groups - 1) * layers * size:
        return  # refused, as tests/errors show
    chosen = plan(scores, remove=remove, uniform=uniform)
    assert remove * total - step < len(chosen.removed) <= remove * total + 1e-9
    for layer in chosen.layers:
        assert layer.keep
        for start in range(0, groups * size, size):
            group = set(range(start, start + size))
            assert group & set(layer.keep) in (set(), group)
    assert chosen.uniform or not uniform
    assert chosen.model == "abc"


@given(seed=seeds, size=st.integers(1, 3), rounds=st.booleans(), uniform=st.booleans())
def test_what_a_curve_measures_is_what_a_plan_removes(
    seed: int, size: int, rounds: bool, uniform: bool
) -> None:
    scores = _scores(seed, layers=3, groups=5, size=size, rounds=rounds)
    order, ends = removal_order(scores, uniform=uniform)
    assert sorted(order) == sorted(scores.heads)
    for end in ends:
        gone = plan(scores, remove=end / len(order), uniform=uniform).removed
        assert set(gone) == set(removable(order)[:end])
    assert ends[-1] == 3 * 4 * size
    if size == 1 and not uniform:
        assert order[: ends[-1]] == removable(scores.order())


@given(seed=seeds, size=st.integers(1, 3), uniform=st.booleans(), last=st.integers(1, 8))
def test_a_plan_within_a_loss_removes_heads_up_to_the_elbow(
    seed: int, size: int, uniform: bool, last: int
) -> None:
    scores = _scores(seed, layers=3, groups=5, size=size)
    _, ends = removal_order(scores, uniform=uniform)
    points = np.array([0, *ends])
    last = min(last, len(ends) - 1)
    growth = np.where(np.arange(len(points)) <= last, 0.0, 0.02)  # 2 % of a loss of 1
    curves = Curves(points, len(scores.heads), {"plans": 1 + growth[None, :, None]}, "lm")
    chosen = plan(scores, within=0.01, curves=curves, uniform=uniform)
    assert len(chosen.removed) == ends[last - 1]
    assert (
        chosen.removed
        == plan(scores, remove=ends[last - 1] / len(scores.heads), uniform=uniform).removed
    )
    assert f"{ends[last - 1]} of {len(scores.heads)} heads before the loss lm grows by 0.01" in (
        chosen.why
    )


def test_the_importance_of_a_group_is_the_sum_of_its_heads() -> None:
    heads = tuple(Head("", 0, head) for head in range(6))
    values = np.array([[0.0, 9.0, 3.0, 3.0, 5.0, 5.0]])
    scores = Scores(heads, np.array([0, 0, 1, 1, 2, 2]), values)
    assert plan(scores, remove=0.34).removed == (heads[2], heads[3])


def test_a_single_group_loses_single_heads() -> None:
    heads = tuple(Head("", 0, head) for head in range(4))
    scores = Scores(heads, np.zeros(4, np.int64), np.array([[3.0, 1.0, 2.0, 4.0]]))
    assert plan(scores, remove=0.5).removed == (heads[1], heads[2])


def test_named_heads_are_removed_whatever_their_scores() -> None:
    scores = _scores(0, layers=2, groups=3, size=1)
    chosen = plan(scores, heads={0: [1], 1: [0, 2]})
    assert [str(head) for head in chosen.removed] == ["L0.H1", "L1.H0", "L1.H2"]


def _costs(scores: Scores) -> Costs:
    shared = np.full(len(scores.heads), 10.0)
    parameters = np.arange(1.0, len(scores.heads) + 1)
    return Costs(
        scores.heads, scores.kv_heads, {"parameters": parameters}, {"parameters": shared}, "abc"
    )


@given(seed=seeds, share=st.floats(0.45, 0.95))
def test_a_budget_is_kept_with_as_few_heads_as_the_order_allows(seed: int, share: float) -> None:
    scores = _scores(seed, layers=2, groups=4, size=2)
    counted = _costs(scores)
    most = share * counted.after([], "parameters")
    chosen = plan(scores, budget={"parameters": most}, costs=counted)
    assert counted.after(chosen.removed, "parameters") <= most
    fewer = len(chosen.removed) - 2
    if fewer:
        smaller = plan(scores, remove=(fewer + 0.5) / len(scores.heads))
        assert set(smaller.removed) < set(chosen.removed)
        assert counted.after(smaller.removed, "parameters") > most


def test_a_plan_with_costs_reports_what_it_saves(tmp_path: Path) -> None:
    scores = _scores(1, layers=2, groups=4, size=2)
    counted = _costs(scores)
    chosen = plan(scores, remove=0.5, costs=counted)
    before, after = counted.after([], "parameters"), counted.after(chosen.removed, "parameters")
    assert chosen.costs == {"parameters": (before, after)}
    assert f"parameters of heads: {before:g} before, {after:g} after (-" in str(chosen)
    assert Plan.load(chosen.save(tmp_path / "plan.json")) == chosen
    assert plan(scores, remove=0.5).costs == {}


def test_costs_are_equal_after_saving_and_loading(tmp_path: Path) -> None:
    heads = (Head("encoder", 0, 0), Head("encoder", 0, 1))
    each = {"parameters": np.array([2.0, 3.0])}
    seconds = {("encoder", 0): np.array([0.1, 0.2, 0.4])}
    saved = Costs(heads, np.array([0, 0]), each, {"parameters": np.zeros(2)}, "abc", seconds)
    loaded = Costs.load(saved.save(tmp_path / "costs.json"))
    assert (loaded.heads, loaded.model, loaded.names) == (heads, "abc", saved.names)
    for gone in ((), heads[:1]):
        for name in saved.names:
            assert loaded.after(gone, name) == saved.after(gone, name)
    np.testing.assert_array_equal(loaded.kv_heads, saved.kv_heads)


def test_an_encoder_has_no_cache_cost_and_a_decoder_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.utils.generic.logger.warning_once", pytest.fail)
    assert costs(zoo.make("Bert")).names == ("parameters", "multiply_adds")
    counted = costs(tiny_t5(num_layers=1))
    assert counted.after((), "cache_bytes") == 2 * 4 * 12 * 4  # two attentions of the decoder


def test_costs_of_torch_layers_are_what_pruning_saves() -> None:
    layer = torch.nn.TransformerEncoderLayer(12, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    counted, gone = costs(model), [Head("", 0, 1), Head("", 1, 2)]
    before, after = (
        sum(x.numel() for x in module.parameters()) for module in (model, prune(model, gone))
    )
    assert counted.names == ("parameters", "multiply_adds")
    saved = counted.after((), "parameters") - counted.after(gone, "parameters")
    assert saved == before - after


def test_shared_weights_cost_as_long_as_one_head_reads_them() -> None:
    heads = tuple(Head("", 0, head) for head in range(4))
    each, none = np.ones(4), np.zeros(4)
    counted = Costs(heads, np.array([0, 0, 1, 1]), {"bytes": none}, {"bytes": 8 * each})
    assert counted.after([], "bytes") == 16
    assert counted.after([heads[0]], "bytes") == 16
    assert "bytes 16" in str(counted)
    assert counted.after(heads[:2], "bytes") == 8


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Phi3", "GptOss", "FalconMultiQuery"])
def test_a_plan_predicts_what_pruning_saves(name: str) -> None:
    model = zoo.make(name)
    batch = padded([[5, 9, 7, 3, 11, 8, 4], [4, 6]], "right")
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    counted = costs(model)
    chosen = plan(importance(model, [batch]), remove=0.5)
    small = prune(model, chosen)
    saved = {
        name: counted.after([], name) - counted.after(chosen.removed, name)
        for name in ("parameters", "cache_bytes")
    }
    before, after = (sum(x.numel() for x in module.parameters()) for module in (model, small))
    assert saved["parameters"] == before - after
    before, after = (_cached(module, batch) for module in (model, small))
    assert saved["cache_bytes"] == before - after


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "Phi3"])
def test_operations_follow_from_the_sizes(name: str) -> None:
    model = zoo.make(name)
    kv_heads = getattr(model.config, "num_key_value_heads", None)
    work = layer_sizes(24, 4, kv_heads).multiply_adds(7)
    counted = costs(model, {"input_ids": torch.arange(14).view(2, 7)})
    assert counted.after([], "multiply_adds") == 2 * sum(work.values())
    assert counted.after(counted.heads[:2], "multiply_adds") == 1.5 * sum(work.values())


def test_time_is_measured_at_some_head_counts_and_interpolated_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_many_as_heads(models: list[torch.nn.Module], batch: object) -> list[PassTimes]:
        """Two and a half seconds for every head, and one for the layer."""
        heads = [[a.site.n_heads for a in find_attentions(model, batch)] for model in models]
        return [PassTimes(9.0, tuple(1 + 2.5 * n for n in each)) for each in heads]

    monkeypatch.setattr(_measure, "time_passes", as_many_as_heads)
    model, batch = zoo.make("GPT2"), {"input_ids": torch.arange(14).view(2, 7)}
    counted = costs(model, batch, timed=True)
    assert [*counted.seconds[("", 1)]] == [3.5, 3.5, 6, 8.5, 11]
    assert counted.after([], "seconds") == 22
    scores = importance(model, [batch])
    chosen = plan(scores, budget={"seconds": 17.5}, costs=counted)
    assert len(chosen.removed) == 2
    assert counted.after(chosen.removed, "seconds") == 17


def test_passes_are_timed_alternately_and_leave_the_models_unchanged() -> None:
    model = zoo.make("Albert").train()  # one module is called twice
    small = prune(model, [(0, 1), (1, 1)])
    before = modules_of(model)
    times = time_passes([model, small], {"input_ids": torch.arange(14).view(2, 7)}, passes=3)
    assert modules_of(model) == before
    assert model.training
    assert [len(timing.blocks) for timing in times] == [2, 2]
    assert all(time > 0 for timing in times for time in (timing.whole, *timing.blocks))


def test_the_given_clock_measures_the_time() -> None:
    model = zoo.make("Bert")
    ticks = iter(range(1000))
    [times] = time_passes(
        [model], {"input_ids": torch.arange(5)[None]}, 3, lambda: 2.0 * next(ticks)
    )
    # The clock is read before and after, and not in between.
    assert times.whole == 2.0
    assert times.blocks == (2.0,) * len(
        find_attentions(model, {"input_ids": torch.arange(5)[None]})
    )


def test_a_cache_of_latents_belongs_to_no_single_head() -> None:
    counted = costs(zoo.make("DeepseekV3"))
    assert counted.names == ("parameters", "multiply_adds")
    with pytest.raises(ArgumentError, match=r"'cache_bytes' is not one of .*latents that all"):
        counted.after([], "cache_bytes")


def _cached(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the keys and values of one token."""
    sizes: list[int] = []
    with torch.no_grad(), capture_calls(model, lambda call: sizes.extend(
        x.shape[1] * x.shape[3] * x.element_size() for x in (call.k, call.v)
    )):  # fmt: skip
        model(**batch)
    return sum(sizes)


# A plan lists removed and kept heads, and loads equal after saving.


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    heads = [Head("encoder", layer, head) for layer, n in enumerate(sizes) for head in range(n)]
    gone = [
        Head("encoder", layer, head)
        for layer, n in enumerate(sizes)
        for head in draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    ]
    return Plan.of(draw(st.permutations(gone)), heads, draw(st.text()), draw(st.text()))


@given(_plans())
def test_heads_go_or_stay(plan: Plan) -> None:
    for layer in plan.layers:
        assert sorted([*layer.remove, *layer.keep]) == list(range(layer.n_heads))
        assert layer.keep
    assert len(plan.removed) == sum(len(layer.remove) for layer in plan.layers)
    assert plan.uniform == (len({len(layer.keep) for layer in plan.layers}) == 1)


@given(plan=_plans())
def test_a_saved_plan_loads_equal(plan: Plan, tmp_path_factory: object) -> None:
    folder: Path = tmp_path_factory.mktemp("plan")  # type: ignore[attr-defined]
    assert Plan.load(plan.save(folder / "plan.json")) == plan


# Curves agree with `ablate`, and with a small case computed by hand.


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
    loss = EMBEDDING
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
    assert curves.elbow("one", 0.6).heads == 2
    assert curves.elbow("one", 0.5).heads == 0  # a loss equal to the allowance is not below it
    assert curves.elbow("one", 9.0).heads == 5
    assert curves.elbow("random", 1.6).heads == 3  # the median of 5 and 2, whole heads
    np.testing.assert_allclose(curves.mean("random"), [[0.0, 0.5, 1.5], [0.0, 1.5, 4.5]])


def test_a_curve_that_recovers_counts_up_to_its_first_crossing() -> None:
    values = np.array([[[0.0], [1.0], [0.1]]])
    assert Curves(np.array([0, 1, 2]), 4, {"one": values}).elbow("one", 0.5).heads == 0


def test_the_elbow_of_a_small_case() -> None:
    # Two texts: a quarter of all draws takes the first twice, a quarter the second twice.
    curves = _curves()
    assert curves.elbow("one", 0.6) == Elbow(2, 0.0, 2.0, 5)  # 0.25 and 0.75 of the two at 2 heads
    assert curves.elbow("one", 9.0) == Elbow(5, 5.0, 5.0, 5)
    assert curves.elbow("random", 1.6) == Elbow(3, 0.0, 5.0, 5)
    elbow = Curves(np.array([0, 1]), 4, {"one": np.zeros((1, 2, 1))}).elbow("one", 0.1)
    assert elbow.heads == 1
    assert np.isnan([elbow.low, elbow.high]).all()


@pytest.mark.full
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
    curves = prune_curves(model, [batch], {"mine": HEADS})  # one order is as good as a list of one
    assert curves.removed.tolist() == [0, 1, 2, 3, 4, 5, 6]
    explicit = prune_curves(model, [batch], {"mine": [HEADS], "drawn": random_orders(HEADS, 5)})
    assert list(explicit.per_text) == ["mine", "drawn"]
    np.testing.assert_array_equal(curves.per_text["mine"], explicit.per_text["mine"])
    np.testing.assert_array_equal(curves.per_text["random"], explicit.per_text["drawn"])
    alone = prune_curves(model, [batch], {"mine": HEADS}, random=0)
    np.testing.assert_array_equal(alone.per_text.pop("mine"), curves.per_text["mine"])
    assert not alone.per_text


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
    tokenizer = word_tokenizer("abcdefghij")
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
