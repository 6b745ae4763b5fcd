"""Watching our own layers: additive, in any split and order, whatever the padding."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.layer import ALiBi, MultiHeadAttention, RoPE
from headwise.tables import STATISTICS, HeadTable
from headwise.watch import Request, observe
from house.source import ROOT
from oracles import means, padded
from oracles_layer import AttentionWith

CONFIG = MiniGPTConfig(vocab_size=13, context=12, d_model=12, n_heads=4, n_kv_heads=2, n_layers=2)
texts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9), min_size=1, max_size=4)


def _model() -> MiniGPT:
    torch.manual_seed(1)
    return MiniGPT(CONFIG).eval()


MODEL = _model()


def _follow(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Earlier copies of the same token: several keys for a query, or none."""
    return [(q, k) for q in range(len(ids)) for k in range(q) if ids[q] == ids[k]]


def _odd(ids: Sequence[int]) -> list[tuple[int, int]]:
    return [(q, k) for q in range(len(ids)) for k in range(q + 1) if ids[k] % 2]


REQUEST = Request(classes={"odd": {1, 3, 5, 7, 9, 11}}, relations={"copy": _follow})


def _watch(batches: Sequence[dict[str, torch.Tensor]], request: Request = REQUEST) -> HeadTable:
    with torch.no_grad(), observe(MODEL, request) as watch:
        for batch in batches:
            MODEL(**batch)
    return watch.table()


def _assert_close(one: HeadTable, two: HeadTable) -> None:
    for name in one.statistics:
        np.testing.assert_array_equal(one.count(name), two.count(name), err_msg=name)
        for column in ("mean", "standard_error", "maximum", "uniform"):
            mine, theirs = (getattr(table, column)(name) for table in (one, two))
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@settings(max_examples=8)
@given(texts=texts, seed=st.integers(0, 99))
def test_any_split_and_order_gives_the_same_table(texts: list[list[int]], seed: int) -> None:
    whole = _watch([padded(texts, "right")])
    order = np.random.default_rng(seed).permutation(len(texts))
    _assert_close(_watch([padded([texts[at]], "right") for at in order]), whole)
    if len(texts) > 1:
        one, two = (_watch([padded(part, "right")]) for part in (texts[:1], texts[1:]))
        _assert_close(one + two, whole)


@settings(max_examples=12)
@given(texts=texts)
def test_statistics_are_those_of_the_weights(texts: list[list[int]]) -> None:
    table = _watch([padded(texts, "right")])
    layers = _maps(texts)
    pairs = {
        "copy": [(n, q, k) for n, ids in enumerate(texts) for q, k in _follow(ids)],
        "odd": [(n, q, k) for n, ids in enumerate(texts) for q, k in _odd(ids)],
    }
    for layer, maps in enumerate(layers):
        expected = means(maps, pairs)
        for name in ("entropy", "max_weight", "first", "self", "previous", "distance", *pairs):
            ours = table.mean(name)[4 * layer : 4 * layer + 4]
            theirs = expected.get(name, np.full(4, np.nan))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.isnan(table.mean("next")).all()  # a decoder never sees the next token
    assert np.isnan(table.mean("sink")).all()
    tokens = sum(map(len, texts))
    assert (table.count("lse") == tokens).all()
    assert (table.count("entropy") == tokens - len(texts)).all()  # whose first rows see one key


def test_every_statistic_has_an_oracle_a_page_and_a_line_in_the_glossary() -> None:
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    layer = MultiHeadAttention(12, 4, 2, gate=True).double()
    layer.attention = AttentionWith(sinks=sinks.double())
    assert layer.gate_proj is not None
    x = torch.randn(2, 7, 12).double()
    request = Request(statistics=(*STATISTICS,), maps=True)
    with torch.no_grad(), observe(layer, request) as watch:
        layer(x)
        weights = torch.stack([watch.weights((0, head)) for head in range(4)], 1)
        q, k, v = (
            project(x).unflatten(-1, (-1, 3)).transpose(1, 2)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        logits = q @ k.transpose(-1, -2) / 3**0.5
        writes = weights @ v @ layer.out_proj.weight.T.unflatten(0, (4, 3))
        gates = layer.gate_proj(x).sigmoid().transpose(1, 2)
    of_text = ([*each.numpy()] for each in (logits, writes, gates))
    expected = means(weights.numpy(), None, *of_text)
    assert expected.keys() == STATISTICS.keys()
    for name, theirs in expected.items():
        np.testing.assert_allclose(watch.table().mean(name), theirs, rtol=1e-9, err_msg=name)
        for page in ("observing.md", "glossary.md"):
            assert f"`{name}`" in (ROOT / "docs" / page).read_text("utf-8"), f"{name}: {page}"


def _maps(texts: list[list[int]]) -> list[list[np.ndarray]]:
    """Whole matrices by the watch itself, which another law holds to the layer's weights."""
    layers: list[list[np.ndarray]] = [[], []]
    for ids in texts:
        with torch.no_grad(), observe(MODEL, Request(statistics=(), maps=True)) as watch:
            MODEL(torch.tensor([ids]))
        for layer in range(2):
            heads = [watch.weights((layer, head))[0] for head in range(4)]
            layers[layer].append(torch.stack(heads).double().numpy())
    return layers


def test_uniform_attention_has_closed_forms() -> None:
    layer = MultiHeadAttention(6, 2)
    torch.nn.init.zeros_(layer.q_proj.weight)
    with torch.no_grad(), observe(layer) as watch:
        layer(torch.randn(3, 5, 6), causal=True)
    table = watch.table()
    np.testing.assert_allclose(table.mean("entropy"), np.log([2, 3, 4, 5]).mean(), rtol=1e-6)
    np.testing.assert_allclose(table.mean("distance"), np.mean([0.5, 1, 1.5, 2]), rtol=1e-6)
    np.testing.assert_allclose(
        table.mean("first"), np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 5]), rtol=1e-6
    )
    np.testing.assert_allclose(table.mean("max_logit"), 0, atol=1e-7)
    np.testing.assert_allclose(table.mean("lse"), np.log([1, 2, 3, 4, 5]).mean(), rtol=1e-6)
    for name in ("entropy", "distance", "first", "self", "previous", "max_weight"):
        np.testing.assert_allclose(table.mean(name), table.uniform(name), rtol=1e-6)


@pytest.mark.parametrize("cell", [1, 1 << 19])
def test_the_blocks_of_a_layer_are_its_weights(cell: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.rows._attend.CELL", cell)  # 1: as few heads as can be
    layer = MultiHeadAttention(12, 4, 2)
    x = torch.randn(3, 7, 12)
    with torch.no_grad(), observe(layer, Request(statistics=("entropy",), maps=True)) as watch:
        known = layer(x, causal=True, need_weights=True).weights
        layer(x, causal=True)
    (seen,) = watch.layers()
    assert seen.heads == watch.table().heads
    assert torch.equal(seen.visible, torch.ones(3, 1, 7, 7).tril().bool())
    heads = []
    for block in seen.blocks():
        heads += range(4)[block.heads]
        torch.testing.assert_close(block.weights, known[:, block.heads])
        entropy = -torch.xlogy(block.weights, block.weights).sum(-1)
        torch.testing.assert_close(block.entropy, entropy)
    assert heads == [0, 1, 2, 3]
    norms = seen.value_norms()
    wide = layer.v_proj(x).unflatten(-1, (2, 3)).transpose(1, 2).repeat_interleave(2, 1)
    per_head = layer.out_proj.weight.unflatten(1, (4, 3)).permute(1, 2, 0)
    torch.testing.assert_close(norms, (wide @ per_head).norm(dim=-1))


def test_cross_attention_has_no_neighbors() -> None:
    layer = MultiHeadAttention(6, 2, kdim=5)
    with torch.no_grad(), observe(layer) as watch:
        layer(torch.randn(3, 4, 6), torch.randn(3, 4, 5))
    table = watch.table()
    assert [str(head) for head in table.heads] == ["cross.L0.H0", "cross.L0.H1"]
    for name in ("self", "previous", "next", "distance"):
        assert np.isnan(table.mean(name)).all()
    assert (table.count("first") == 12).all()


def test_a_layer_with_every_part_is_watched() -> None:
    layer = MultiHeadAttention(
        12, 4, 2, v_head_dim=5, qk_norm=True, gate=True, rope=RoPE(4),
        head_dim=4, position_bias=ALiBi(4),
    )  # fmt: skip
    layer.attention = AttentionWith(sinks=torch.full((4,), 0.5))
    x = torch.randn(2, 7, 12)
    with torch.no_grad(), observe(layer, Request(maps=True)) as watch:
        weights = layer(x, causal=True, need_weights=True).weights
    table = watch.table()
    np.testing.assert_allclose(table.mean("sink"), 1 - weights.sum(-1).mean((0, 2)), rtol=1e-4)
    torch.testing.assert_close(watch.weights("L0.H3"), weights[:, 3])


def test_large_logits_are_rounded_by_more_and_still_understood() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(256, 4).eval()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight *= 150.0
        with observe(layer) as watch:
            layer(torch.randn(2, 200, 256), causal=True)
    assert (watch.table().maximum("max_logit") > 5000).all()
