"""Scores of kv heads follow from their definition, and plans from the scores."""

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

import headwise as hw
from double import Double, doubled
from headwise.caching import CachePlan, LayerCachePlan, retrieval_batches
from headwise.caching._plan import full_plan
from headwise.caching._scores import ScoringTexts, streamed_losses
from headwise.models import fingerprint
from headwise.scoring import find_loss
from tiers import tiers

SINKS, WINDOW = 2, 4


def batches(n: int = 2, padding: int = 0, n_tokens: int = 23) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(5)
    texts = []
    for _ in range(n):
        ids = torch.randint(3, zoo.VOCABULARY, (2, n_tokens), generator=rng)
        real = torch.ones_like(ids)
        real[0, :padding] = 0
        texts.append({"input_ids": ids, "attention_mask": real})
    return texts


def streaming(layer: int, head: int) -> CachePlan:
    """One kv head streams, the others keep all tokens."""
    layers = [
        LayerCachePlan(i, tuple(WINDOW if (i, j) == (layer, head) else None for j in range(2)))
        for i in range(2)
    ]
    return CachePlan(tuple(layers), SINKS)


def gated_losses(model, loss, batch, gates):
    counts = [len(layer.windows) for layer in full_plan(model).layers]
    return streamed_losses(model, counts, loss, batch, gates, (SINKS, WINDOW))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", tiers(["Llama"], ["GptOss", "Gemma2"]))
def test_a_closed_gate_is_what_the_cache_loses(name: str, padding: int) -> None:
    model, texts = zoo.make(name), batches(padding=padding)
    loss = find_loss(None, model, texts[0])
    heads = [(layer, head) for layer in range(2) for head in range(2)]
    for number, (layer, head) in enumerate(heads):
        gates = torch.ones(len(heads), dtype=torch.float64)
        gates[number] = 0
        for batch in texts:
            with torch.no_grad(), streaming(layer, head).cache(model) as cache:
                with_cache = loss.per_text(model(**batch, cache=cache), batch)
                gated = gated_losses(model, loss, batch, gates)
            np.testing.assert_allclose(with_cache, gated, atol=2e-5)


def test_scores_equal_finite_differences() -> None:
    with Double():
        model, texts = doubled(zoo.make("Llama")), batches(1)
        scores = ScoringTexts.read(model, texts, None, None).score(SINKS, WINDOW)
        loss = find_loss(None, model, texts[0])
        step = 1e-5
        with torch.no_grad():
            for head, expected in enumerate(scores.values()):
                ends = []
                for sign in (-1, 1):
                    gates = torch.full((4,), 0.5)
                    gates[head] += sign * step
                    ends.append(gated_losses(model, loss, texts[0], gates))
                slope = (ends[0] - ends[1]) / (2 * step)
                np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-9)


def test_open_gates_change_no_bit() -> None:
    model, texts = zoo.make("Llama"), batches(1, padding=4)
    loss = find_loss(None, model, texts[0])
    with torch.no_grad():
        plain = loss.per_text(model(**texts[0]), texts[0])
        assert torch.equal(gated_losses(model, loss, texts[0], torch.ones(4)), plain)
        assert not torch.equal(gated_losses(model, loss, texts[0], torch.zeros(4)), plain)


def test_a_head_without_values_loses_nothing() -> None:
    """A kv head whose value projection is zero gives nothing, wherever it looks."""
    model = zoo.make("Llama")
    width = model.config.head_dim
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[width:] = 0
    scores = ScoringTexts.read(model, batches(), None, None).score(SINKS, WINDOW)
    assert abs(scores[1, 1].mean()) < 1e-6 < abs(scores[1, 0].mean())


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_a_plan_keeps_the_heads_that_lose_most(keep: float) -> None:
    model = zoo.make("Llama")
    scores = ScoringTexts.read(model, batches(), None, None).score(SINKS, WINDOW)
    plan = hw.cache_plan(model, batches(), keep=keep, sinks=SINKS, window=WINDOW)
    best = sorted(scores, key=lambda head: -scores[head].mean())
    expected = {*best[: int(keep * 4)]}
    assert {(layer, head) for layer, heads in plan.full.items() for head in heads} == expected
    assert plan.model == fingerprint(model)
    assert set(plan.measured) >= {"loss of the full cache", "loss of this cache"}
    if keep == 1.0:
        assert plan.measured["loss of the full cache"] == plan.measured["loss of this cache"]


@pytest.mark.full
def test_bytes_are_those_of_the_cache() -> None:
    model, texts = zoo.make("Llama"), batches()
    token = 2 * model.config.head_dim * 4
    for n_full in range(5):
        most = token * (n_full * 23 + (4 - n_full) * (SINKS + WINDOW))
        plan = hw.cache_plan(model, texts, bytes=most, sinks=SINKS, window=WINDOW)
        assert sum(len(heads) for heads in plan.full.values()) == n_full
        assert plan.nbytes(23) == most
        assert plan.share(23) == pytest.approx(most / (token * 4 * 23))


@pytest.mark.full
def test_a_loss_is_kept_with_the_fewest_full_heads() -> None:
    model, texts = zoo.make("Llama"), batches()
    plans = [hw.cache_plan(model, texts, keep=n / 4, sinks=SINKS, window=WINDOW) for n in range(5)]
    losses = [plan.measured["loss of this cache"] for plan in plans]
    for budget in (0.0, 0.05, 10.0):
        plan = hw.cache_plan(model, texts, loss=budget, sinks=SINKS, window=WINDOW)
        assert plan.measured["loss of this cache"] <= losses[4] + budget + 1e-9
        assert plan.windows in [other.windows for other in plans]


def test_retrieval_batches_ask_for_a_span_that_occurs_before() -> None:
    model = zoo.make("Llama")
    made = retrieval_batches(model, 3, 40, seed=1)
    again = retrieval_batches(model, 3, 40, seed=1)
    for batch, same in zip(made, again, strict=True):
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert torch.equal(ids, same["input_ids"][0])
        starts = [i for i in range(20) if torch.equal(ids[i : i + 8], ids[-8:])]
        assert starts
        assert len(ids) == 40
        assert torch.equal(labels[-6:], ids[-6:])
        assert bool((labels[:-6] == -100).all())
    plan = hw.cache_plan(model, made, keep=0.5, sinks=SINKS, window=WINDOW)
    assert "of the loss lm" in plan.why


def test_a_plan_is_saved_and_used_by_another_copy_of_the_model(tmp_path: Any) -> None:
    model, texts = zoo.make("Llama"), batches()
    plan = hw.cache_plan(model, texts, keep=0.5, sinks=SINKS, window=3)
    loaded = CachePlan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    outputs: list[Tensor] = []
    for one, copy in ((plan, model), (loaded, zoo.make("Llama"))):
        with torch.no_grad(), one.cache(copy) as cache:
            outputs.append(copy(**texts[0], cache=cache).logits)
    assert torch.equal(*outputs)


def test_an_observer_sees_what_each_head_still_sees() -> None:
    model, texts = zoo.make("Llama"), batches(1, padding=3)
    plan = CachePlan.of({0: [0]}, n_layers=2, n_kv_heads=2, sinks=0, window=2)
    with torch.no_grad():
        with plan.cache(model) as cache:
            plain = model(**texts[0], cache=cache).logits
        with plan.cache(model) as cache, hw.observe(model) as inside:
            watched = model(**texts[0], cache=cache).logits
        with hw.observe(model) as outside, plan.cache(model) as cache:
            for start, stop in ((0, 9), (9, 10), (10, 23)):
                model(
                    input_ids=texts[0]["input_ids"][:, start:stop],
                    attention_mask=texts[0]["attention_mask"][:, :stop],
                    cache=cache,
                )
    assert torch.equal(plain, watched)
    for watch in (inside, outside):
        near = watch.table().mean("self") + watch.table().mean("previous")
        # Only the query heads of L0.KV0 see more than the query and the token before.
        assert np.all(near[:2] < 0.99)
        np.testing.assert_allclose(near[2:], 1, atol=1e-5)
    first, second = inside.table(), outside.table()
    for name in ("self", "entropy", "distance", "first", "previous"):
        np.testing.assert_array_equal(first.count(name), second.count(name))
        np.testing.assert_allclose(first.mean(name), second.mean(name), atol=1e-4)


def _modules(model: nn.Module) -> list[Any]:
    return [(name, sorted(vars(module))) for name, module in model.named_modules()]


def test_the_model_is_what_it_was_after_an_error() -> None:
    from transformers import AttentionInterface

    model, texts = zoo.make("Llama"), batches(1)
    before, function = _modules(model), AttentionInterface.get_interface
    stock = model.generate(**texts[0], max_new_tokens=5, pad_token_id=0)
    plan = CachePlan.of({0: [0]}, n_layers=2, n_kv_heads=2, window=3)

    def fail_late(*_: Any) -> None:
        if cache.get_seq_length() > 25:
            raise RuntimeError("stop")

    hook = model.model.layers[1].register_forward_pre_hook(fail_late)
    with pytest.raises(RuntimeError, match="stop"), plan.cache(model) as cache:
        model.generate(**texts[0], cache=cache, max_new_tokens=5, pad_token_id=0)
    hook.remove()
    assert _modules(model) == before
    assert AttentionInterface.get_interface is function
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.equal(model.generate(**texts[0], max_new_tokens=5, pad_token_id=0), stock)


def layers_that_differ() -> nn.Module:
    """Wider keys in one layer than in the other, which sees a sliding window alone."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=zoo.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"], sliding_window=9,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, pad_token_id=0,
    )  # fmt: skip
    return Gemma4ForCausalLM(config).eval()


@pytest.mark.parametrize("window", [3, 8, 9])
@pytest.mark.parametrize("full", [{}, {0: [1]}, {0: [0, 1]}])
def test_bytes_are_those_of_the_cache_where_layers_differ(
    full: dict[int, list[int]], window: int
) -> None:
    model, ids = layers_that_differ(), batches(1)[0]["input_ids"][:1]
    plan = hw.cache_plan(model, full=full, window=window, sinks=SINKS)
    with torch.no_grad(), plan.cache(model) as cache:
        model(input_ids=ids, cache=cache)
        assert plan.nbytes(23) == cache.nbytes
    wide = 2 * 8 * 4  # bytes of a token in the second layer, which reserves slots for full heads
    more = hw.cache_plan(model, full={**full, 1: [0]}, window=window, sinks=SINKS)
    assert more.nbytes(23) - plan.nbytes(23) == wide * (23 - SINKS - window)


def test_bytes_are_kept_where_layers_differ() -> None:
    model, texts = layers_that_differ(), batches()
    plan = hw.cache_plan(model, texts, bytes=2000, window=8, sinks=SINKS)
    assert plan.nbytes(23) <= 2000
    assert 0 < plan.share(23) < 1
    assert plan.share(23) == pytest.approx(plan.nbytes(23) / (2 * (9 * 32 + 23 * 64)))
