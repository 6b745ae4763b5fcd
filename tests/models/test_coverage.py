"""The queries a table covers, and modules that do not attend between tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.tables import HeadTable
from headwise.watch import Request, Watch, observe

D_MODEL, HEADS = 12, 3


def _watched(model: nn.Module, *args: Any, **kwargs: Any) -> Watch:
    with torch.no_grad():
        plain = model(*args, **kwargs)
        with observe(model) as watch:
            watched = model(*args, **kwargs)
    plain, watched = (x if isinstance(x, Tensor) else x[0] for x in (plain, watched))
    assert torch.equal(plain, watched)
    return watch


def _big_bird() -> nn.Module:
    config = transformers.BigBirdConfig(
        hidden_size=D_MODEL, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=8,
        vocab_size=23, max_position_embeddings=64, block_size=8, num_random_blocks=1,
        sep_token_id=2,
    )  # fmt: skip
    return transformers.BigBirdModel(config).eval()


def test_a_block_sparse_table_reports_its_coverage(tmp_path: Path) -> None:
    ids = torch.randint(3, 20, (1, 64), generator=torch.Generator().manual_seed(0))
    watch = _watched(_big_bird(), ids)
    site, middle = watch.sites()
    assert site.coverage == "32 queries for 64 tokens"
    assert (middle.name, middle.n_heads) == (site.name, 0)
    assert middle.watched.startswith("not captured")
    table = watch.table()
    np.testing.assert_allclose(table.coverage, [1 / 2] * HEADS)
    np.testing.assert_allclose(table.frame()["coverage"], [1 / 2] * HEADS)
    assert table.count("entropy").tolist() == [32.0] * HEADS
    np.testing.assert_allclose((table + table).coverage, [1 / 2] * HEADS)
    loaded = HeadTable.load(table.save(tmp_path / "table.parquet"))
    np.testing.assert_allclose(loaded.coverage, table.coverage)


def test_a_table_of_all_queries_has_no_coverage_column() -> None:
    config = transformers.BertConfig(
        hidden_size=D_MODEL, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=8,
        vocab_size=23,
    )  # fmt: skip
    watch = _watched(transformers.BertModel(config).eval(), torch.tensor([[3, 4, 5]]))
    assert [site.coverage for site in watch.sites()] == ["all queries"]
    assert watch.table().coverage.tolist() == [1.0] * HEADS
    assert "coverage" not in watch.table().frame()


class ConfigurableAttention(nn.Module):
    """Attention of `[B, T, C]`, whose subclasses decide what attends to what."""

    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q = k = v = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return self.mixed(q, k, v)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class Channels(ConfigurableAttention):
    """The attention of XCiT: each channel of a head attends to its other channels."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.mT for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2)


class Chunks(ConfigurableAttention):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 5)) for x in (q, k, v))
        return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3).transpose(1, 2).flatten(2)


class Windows(ConfigurableAttention):
    """The same chunks folded into the batch, where each is a text."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 5)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        heads = (q @ k.mT).softmax(-1) @ v
        return heads.transpose(1, 2).reshape(-1, 10, D_MODEL)


class Some(ConfigurableAttention):
    """The attention of Informer: only some queries attend."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (q[:, :, :6] @ k.mT).softmax(-1) @ v
        return torch.cat([heads, v[:, :, 6:]], 2).transpose(1, 2).flatten(2)


X = torch.randn(2, 10, D_MODEL, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "why"),
    [(Channels, "not supported: attends among 4 channels"), (Chunks, "among 5 positions")],
)
def test_modules_that_do_not_attend_over_the_text_are_named(
    model: type[nn.Module], why: str
) -> None:
    watch = _watched(nn.Sequential(model(), Some()), X)
    known, unsupported = watch.sites()
    assert (known.name, unsupported.name, unsupported.n_heads) == ("1", "0", 0)
    assert why in unsupported.watched
    assert [str(head) for head in watch.table().heads] == ["L0.H0", "L0.H1", "L0.H2"]
    with pytest.raises(UnsupportedError, match=why):
        _watched(nn.Sequential(model()), X).table()


def test_omitted_queries_are_counted() -> None:
    watch = _watched(nn.Sequential(Some()), X)
    assert [site.coverage for site in watch.sites()] == ["12 queries for 20 tokens"]
    np.testing.assert_allclose(watch.table().coverage, 0.6)


def test_windows_are_named() -> None:
    watch = _watched(nn.Sequential(Windows()), X)
    assert [site.coverage for site in watch.sites()] == ["windows of 5 tokens, each as a text"]
    assert watch.table().coverage.tolist() == [1.0] * HEADS
    assert watch.table().count("lse").tolist() == [20.0] * HEADS


def test_latents_in_place_of_tokens_have_no_neighbors() -> None:
    config = transformers.FunnelConfig(
        vocab_size=23, block_sizes=[1, 2], num_decoder_layers=1, d_model=D_MODEL, n_head=HEADS,
        d_head=4, d_inner=8,
    )  # fmt: skip
    watch = _watched(transformers.FunnelModel(config).eval(), torch.arange(3, 11)[None])
    coverage = [site.coverage for site in watch.sites() if site.n_heads]
    pooled = "4 queries for 8 tokens"
    assert coverage == ["all queries", pooled, pooled, "all queries"]
    table = watch.table()
    halves = table.coverage == 0.5
    assert halves.sum() == 2 * HEADS
    assert np.isnan(table.mean("self")[halves]).all()
    assert not np.isnan(table.mean("self")[~halves]).any()
    assert not np.isnan(table.mean("entropy")).any()


def test_means_over_all_queries_include_queries_without_eligible_keys() -> None:
    layer = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=12, n_layer=1, n_head=3, vocab_size=23)
    ).eval()
    ids = torch.tensor([[5, 9, 7, 3, 11, 8, 4]])
    classes = {"rare": {11}}
    tables = []
    for queries in ("eligible", "all"):
        request = Request(classes=classes, queries=queries, maps=True, top=("rare",))
        with torch.no_grad(), observe(layer, request) as watch:
            layer(ids)
        tables.append(watch.table())
        weights = torch.cat([watch.weights((0, head)) for head in range(3)]).double()
    eligible, every = tables
    assert every.count("rare").tolist() == [7.0] * 3
    assert eligible.count("rare").tolist() == [3.0] * 3
    np.testing.assert_allclose(every.mean("rare"), weights[:, :, 4].mean(1), atol=1e-6)
    np.testing.assert_allclose(eligible.mean("rare"), weights[:, 4:, 4].mean(1), atol=1e-6)
    np.testing.assert_allclose(every.mean("first"), weights[:, :, 0].mean(1), atol=1e-6)
    diagonal = weights.diagonal(dim1=1, dim2=2)
    np.testing.assert_allclose(every.mean("self"), diagonal.mean(1), atol=1e-6)
    behind = weights.diagonal(offset=-1, dim1=1, dim2=2)
    np.testing.assert_allclose(every.mean("previous"), behind.sum(1) / 7, atol=1e-6)
    np.testing.assert_allclose(every.mean("max_weight"), weights.amax(2).mean(1), atol=1e-6)
    entropy = -torch.xlogy(weights, weights).sum(2).mean(1)
    np.testing.assert_allclose(every.mean("entropy"), entropy, atol=1e-5)
    assert every.count("top(rare)").tolist() == [7.0] * 3
    np.testing.assert_allclose(every.mean("lse"), eligible.mean("lse"))


def test_tables_of_other_queries_do_not_add() -> None:
    model = nn.Sequential(Some())
    tables = []
    for queries in ("eligible", "all"):
        with torch.no_grad(), observe(model, Request(queries=queries)) as watch:
            model(X)
        tables.append(watch.table())
    with pytest.raises(ArgumentError, match="means over 'eligible' and 'all' queries do not add"):
        tables[0] + tables[1]
    with pytest.raises(ArgumentError, match=r"Request: queries='each'\. Give 'eligible' or 'all'"):
        Request(queries="each")


def test_a_sparse_model_counts_every_query_without_a_mask_of_the_text() -> None:
    """Its mask hides some tokens from every query, which are no padding."""
    config = transformers.DeepseekV32Config(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=23, intermediate_size=32, q_lora_rank=12, kv_lora_rank=12, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=5, index_n_heads=2, index_head_dim=8, index_topk=3,
        max_position_embeddings=64, first_k_dense_replace=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    ids = torch.randint(3, 20, (2, 23))
    said = _watched(model, ids, attention_mask=torch.ones_like(ids)).table()
    table = _watched(model, ids).table()
    assert said.count("lse").tolist() == [46.0] * 4
    for name in said.statistics:
        np.testing.assert_array_equal(table.count(name), said.count(name))
        np.testing.assert_array_equal(table.mean(name), said.mean(name), err_msg=name)
