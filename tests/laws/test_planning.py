"""Plans meet their constraints: shares, budgets, equal groups, a head in each layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import zoo
from hypothesis import given
from hypothesis import strategies as st

from headwise.counts import layer_sizes
from headwise.errors import ArgumentError
from headwise.models import capture_calls
from headwise.models.ownership import find_attentions
from headwise.scoring import importance
from headwise.surgery import Costs, PassTimes, Plan, _measure, costs, plan, prune, time_passes
from headwise.tables import Head, Scores, removable
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


@given(seed=seeds, remove=st.floats(0.1, 0.6), rounds=st.booleans())
def test_without_groups_heads_go_in_order(seed: int, remove: float, rounds: bool) -> None:
    scores = _scores(seed, layers=3, groups=5, size=1, rounds=rounds)
    gone = plan(scores, remove=remove).removed
    assert set(gone) == set(removable(scores.order())[: len(gone)])


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


def test_an_encoder_has_no_cache_cost_and_a_decoder_has_one() -> None:
    assert costs(zoo.make("Bert")).names == ("parameters", "multiply_adds")
    config = transformers.T5Config(
        vocab_size=23, d_model=24, d_kv=6, d_ff=32, num_layers=1, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    counted = costs(transformers.T5ForConditionalGeneration(config))
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
