"""The queries a table covers, and modules that do not attend between tokens."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from architectures import CASES, SAMPLE
from architectures.decoders import CLASSES, VOCABULARY, make_decoder
from torch import Tensor, nn
from transformers import DynamicCache

import headwise as hw
from headwise.attention import set_attention
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models.texts import without_logits
from headwise.tables import HeadTable
from headwise.watch import Request, observe
from oracles import assert_tables_close, watched
from tiers import tiers

D_MODEL, HEADS = 12, 3


def _big_bird() -> nn.Module:
    config = transformers.BigBirdConfig(
        hidden_size=D_MODEL, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=8,
        vocab_size=23, max_position_embeddings=64, block_size=8, num_random_blocks=1,
        sep_token_id=2,
    )  # fmt: skip
    return transformers.BigBirdModel(config).eval()


def test_a_block_sparse_table_reports_its_coverage(tmp_path: Path) -> None:
    ids = torch.randint(3, 20, (1, 64), generator=torch.Generator().manual_seed(0))
    watch = watched(_big_bird(), ids)
    site, middle = watch.sites()
    assert site.coverage == "32 queries for 64 tokens"
    assert (middle.name, middle.n_heads) == (site.name, 0)
    assert middle.reason == "no product of its softmax with values was found"
    table = watch.table()
    np.testing.assert_allclose(table.coverage, [1 / 2] * HEADS)
    np.testing.assert_allclose(table.frame()["coverage"], [1 / 2] * HEADS)
    assert table.count("entropy").tolist() == [32.0] * HEADS
    np.testing.assert_allclose((table + table).coverage, [1 / 2] * HEADS)
    loaded = HeadTable.load(table.save(tmp_path / "table.parquet"))
    np.testing.assert_allclose(loaded.coverage, table.coverage)


def test_a_table_of_all_queries_has_no_coverage_column() -> None:
    watch = watched(zoo.make("Bert"), torch.tensor([[3, 4, 5]]))
    assert [site.coverage for site in watch.sites()] == ["all queries"] * 2
    assert watch.table().coverage.tolist() == [1.0] * 8
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
    ("model", "why"), [(Channels, "attends among 4 channels"), (Chunks, "among 5 positions")]
)
def test_modules_that_do_not_attend_over_the_text_are_named(
    model: type[nn.Module], why: str
) -> None:
    watch = watched(nn.Sequential(model(), Some()), X)
    known, unsupported = watch.sites()
    assert (known.name, unsupported.name, unsupported.n_heads) == ("1", "0", 0)
    assert why in unsupported.reason
    assert [str(head) for head in watch.table().heads] == ["L0.H0", "L0.H1", "L0.H2"]
    with pytest.raises(UnsupportedError, match=why):
        watched(nn.Sequential(model()), X).table()


def test_windows_are_named() -> None:
    watch = watched(nn.Sequential(Windows()), X)
    assert [site.coverage for site in watch.sites()] == ["windows of 5 tokens, each as a text"]
    assert watch.table().coverage.tolist() == [1.0] * HEADS
    assert watch.table().count("lse").tolist() == [20.0] * HEADS


def test_latents_in_place_of_tokens_have_no_neighbors() -> None:
    config = transformers.FunnelConfig(
        vocab_size=23, block_sizes=[1, 2], num_decoder_layers=1, d_model=D_MODEL, n_head=HEADS,
        d_head=4, d_inner=8,
    )  # fmt: skip
    watch = watched(transformers.FunnelModel(config).eval(), torch.arange(3, 11)[None])
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
    said = watched(model, ids, attention_mask=torch.ones_like(ids)).table()
    table = watched(model, ids).table()
    assert said.count("lse").tolist() == [46.0] * 4
    for name in said.statistics:
        np.testing.assert_array_equal(table.count(name), said.count(name))
        np.testing.assert_array_equal(table.mean(name), said.mean(name), err_msg=name)


# Module calls: calls of one pass belong together, and a part of the model may run alone.


class Flat(nn.Module):
    """Three layers in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(36, 12) / 4 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            q, k, v = F.linear(x, weight).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x


def test_layers_of_one_module_are_layers() -> None:
    with torch.no_grad(), observe(model := Flat()) as watch:
        for _ in range(2):
            model(torch.randn(2, 5, 12))
    assert {head.layer for head in watch.table().heads} == {0, 1, 2}
    assert (watch.table().count("lse") == 20).all()


class Past(nn.Module):
    """Calls the forward method of its module without hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.inner.forward(*args, **kwargs)


def test_a_module_called_without_its_hooks_is_one_layer() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    model.model.layers[0].self_attn = Past(model.model.layers[0].self_attn)
    with torch.no_grad(), observe(model, exact=False) as watch:
        for _ in range(3):
            model(ids)
    assert [str(head) for head in watch.table().heads[::4]] == ["L0.H0", "L1.H0"]
    assert (watch.table().count("lse") == 9).all()


class Condensed(nn.Module):
    """Attention that drops tokens from its queries or keys."""

    def __init__(self, queries: int, keys: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self._steps = nn.Linear(12, 36), (queries, keys, keys)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        q, k, v = (tensor[:, :, ::step] for tensor, step in zip(whole, self._steps, strict=True))
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("queries", "keys"), [(1, 2), (1, 4), (2, 1)])
def test_positions_are_unknown_if_tokens_are_dropped(queries: int, keys: int) -> None:
    model, x = Condensed(queries, keys), torch.randn(2, 8, 12)
    with torch.no_grad(), observe(model) as watch:
        model(x)
    table = watch.table()
    assert (table.count("entropy") == 16 // queries).all()
    for name in ("self", "previous", "next", "distance"):
        assert np.isnan(table.mean(name)).all(), name


def test_a_model_that_runs_in_two_threads_at_once_is_refused() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    inside, go = Event(), Event()

    def wait(*_: object) -> None:
        inside.set()
        go.wait(60)

    with torch.no_grad(), observe(model) as watch:
        handle = model.model.layers[1].register_forward_pre_hook(wait)
        thread = Thread(target=model, args=(ids,))
        thread.start()
        inside.wait(60)
        with pytest.raises(UnsupportedError, match="LlamaForCausalLM runs in two threads at once"):
            model(ids)
        go.set()
        thread.join()
        handle.remove()
        model(ids)
    assert {head.layer for head in watch.table().heads} == {0, 1}


def test_a_model_with_nan_is_watched() -> None:
    model, ids = zoo.make("Llama"), torch.tensor([[5, 9, 7]])
    nn.init.constant_(model.model.layers[0].self_attn.q_proj.weight, float("nan"))
    with torch.no_grad(), observe(model) as watch:
        model(ids)
    assert np.isnan(watch.table().mean("lse")[0])


@pytest.mark.parametrize("name", ["Mistral", "Llama"])
def test_received_mass_covers_the_whole_text_with_a_rolling_cache(name: str) -> None:
    model, text = zoo.make(name), torch.tensor([[5, 9, 7, 3, 11, 8, 2, 4]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(text, output_attentions=True).attentions
        cache = DynamicCache(config=model.config)
        with observe(model, Request(received=True)) as watch:
            for piece in text.split(3, dim=1):
                model(piece, cache=cache)
    for layer in (0, 1):
        received = watch.received(f"L{layer}.H1")
        torch.testing.assert_close(received, maps[layer][:, 1].sum(1), atol=1e-4, rtol=1e-4)


def test_images_of_one_pass_are_texts_of_one_layer() -> None:
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=24, hidden_size=24, num_heads=3, patch_size=2, mlp_ratio=1
    )
    torch.manual_seed(0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    tower = model._from_config(config).eval()
    patches, grid = torch.randn(24, 3 * 2 * 2 * 2), torch.tensor([[1, 4, 2], [1, 4, 4]])
    images = [(patches[:8], grid[:1]), (patches[8:], grid[1:])]
    tables = []
    for passes in ([(patches, grid)], images):
        with torch.no_grad(), observe(tower, Request(per_text=True)) as watch:
            for image in passes:
                tower(*image)
        tables.append(watch.table())
    together, apart = tables
    assert together.heads == apart.heads
    assert {head.layer for head in together.heads} == {0, 1}
    assert together.per_text("lse").count[:, 0].tolist() == [8, 16]
    for name in apart.statistics:
        parts = zip(together.per_text(name).parts, apart.per_text(name).parts, strict=True)
        for ours, known in parts:
            np.testing.assert_allclose(ours, known, rtol=1e-4, atol=1e-5, err_msg=name)


# Texts packed into one row of a Hugging Face model are the texts one by one.


TEXTS = [[5, 9, 7, 3, 11], [4, 6], [8, 10, 3, 3, 12, 9], [7]]


def _copies(ids: list[int]) -> list[tuple[int, int]]:
    return [(q, k) for q in range(len(ids)) for k in range(len(ids)) if q != k and ids[q] == ids[k]]


REQUEST = Request(
    statistics=(*Request().statistics, "participation"),
    classes={"threes": {3}}, relations={"copy": _copies},
    top=("first", "threes"), value=("copy",), per_text=True,
)  # fmt: skip


def _table_of_batches(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> HeadTable:
    with torch.no_grad(), observe(model, REQUEST) as watch:
        for batch in batches:
            model(**batch)
    return watch.table()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "Qwen3"])
def test_packed_texts_give_the_table_of_texts_one_by_one(name: str) -> None:
    model = zoo.make(name).double()
    flat = torch.tensor([[token for text in TEXTS for token in text]])
    positions = torch.cat([torch.arange(len(text)) for text in TEXTS])[None]
    packed = _table_of_batches(
        model, [{"input_ids": flat, "position_ids": positions, "use_cache": False}]
    )
    single = _table_of_batches(model, [{"input_ids": torch.tensor([text])} for text in TEXTS])
    for name in single.statistics:
        for ours, known in zip(
            packed.per_text(name).parts, single.per_text(name).parts, strict=True
        ):
            np.testing.assert_allclose(ours, known, rtol=1e-6, atol=1e-9, err_msg=name)
        maximum = single.maximum(name)
        np.testing.assert_allclose(packed.maximum(name), maximum, rtol=1e-6, err_msg=name)
    assert packed.per_text("lse").count[:, 0].tolist() == [5, 2, 6, 1]


def test_packed_texts_the_model_mixes_count_as_one() -> None:
    # With a cache, positions do not mark the beginnings of texts.
    model = zoo.make("Llama").double()
    batch = {
        "input_ids": torch.tensor([[5, 9, 7, 3]]),
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }
    table = _table_of_batches(model, [batch | {"use_cache": True}])
    assert table.per_text("lse").count[:, 0].tolist() == [4]


# `scaled_dot_product_attention` on other numbers of axes than four.


FUSED_HEADS, WIDTH, T, WINDOWS = 4, 3, 5, 2
MASK = torch.ones(T, T, dtype=torch.bool).tril()


class AxesAttention(nn.Module):
    """The same attention on queries of 2 to 5 axes; `n_heads` is what it declares."""

    def __init__(self, axes: str, n_heads: int = FUSED_HEADS) -> None:
        super().__init__()
        self.axes, self.n_heads = axes, n_heads
        self.qkv = nn.Linear(FUSED_HEADS * WIDTH, 3 * FUSED_HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.axes)(*self.qkv(x).unflatten(-1, (3, FUSED_HEADS, -1)).unbind(2))

    def four(self, *qkv: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), attn_mask=MASK)
        return heads.transpose(1, 2).flatten(2)

    def three(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in qkv)
        mask = MASK.expand(len(q), T, T)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return heads.unflatten(0, (-1, FUSED_HEADS)).transpose(1, 2).flatten(2)

    def two(self, *qkv: Tensor) -> Tensor:
        texts = [
            [
                F.scaled_dot_product_attention(*(x[row, :, h] for x in qkv), attn_mask=MASK)
                for h in range(FUSED_HEADS)
            ]
            for row in range(len(qkv[0]))
        ]
        return torch.stack([torch.cat(heads, -1) for heads in texts])

    def grouped(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (2, -1)).permute(0, 2, 3, 1, 4) for x in qkv)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=MASK.expand(2, T, T))
        return heads.permute(0, 3, 1, 2, 4).flatten(2)

    def windows(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(1, (WINDOWS, T)).transpose(2, 3) for x in qkv)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=MASK)
        return heads.transpose(2, 3).flatten(1, 2).flatten(2)


def _alike(axes: str) -> tuple[AxesAttention, AxesAttention]:
    torch.manual_seed(0)
    model, usual = AxesAttention(axes), AxesAttention("four")
    usual.load_state_dict(model.state_dict())
    return model, usual


@pytest.mark.parametrize("axes", ["three", "grouped", "windows"])
def test_heads_on_any_number_of_axes_are_those_on_four(axes: str) -> None:
    model, usual = _alike(axes)
    x = torch.randn(3, WINDOWS * T if axes == "windows" else T, FUSED_HEADS * WIDTH)
    table = watched(model, x, passes=2).table()
    # Each window is a text.
    known = watched(usual, x.view(-1, T, FUSED_HEADS * WIDTH), passes=2).table()
    assert_tables_close(table, known)


def test_queries_of_two_axes_are_a_head_of_a_text() -> None:
    model, usual = _alike("two")
    x = torch.randn(1, T, FUSED_HEADS * WIDTH)
    table, known = watched(model, x, passes=2).table(), watched(usual, x, passes=2).table()
    for name in known.statistics:
        mean = known.mean(name).mean()  # the calls on parts of the same queries are one head
        np.testing.assert_allclose(table.mean(name), [mean], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("n_heads", [1, 3])
def test_queries_of_five_axes_without_a_number_of_heads_are_listed(n_heads: int) -> None:
    model = nn.Sequential(AxesAttention("four"), AxesAttention("grouped", n_heads))
    watch = watched(model, torch.randn(3, T, FUSED_HEADS * WIDTH), passes=2)
    why = r"which axes of its queries (3, 2, 2, 5, 3) are heads is unknown"
    assert {site.name: site.reason for site in watch.sites()}["1"] == why
    assert [str(head) for head in watch.table().heads] == [
        f"L0.H{head}" for head in range(FUSED_HEADS)
    ]


# Blocks of timm and diffusers in both of their paths, with the owners of their keys.


DIM, BLOCK_HEADS = 20, 4
PATCHES = torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(1))  # as many tokens


class AttnProcessor:
    """The attention of diffusers: heads folded into the batch, and a softmax."""

    def __call__(self, attn: "DiffusersAttention", x: Tensor, encoder: Tensor | None) -> Tensor:
        encoder = x if encoder is None else encoder
        q, k, v = attn.to_q(x), attn.to_k(encoder), attn.to_v(encoder)
        q, k, v = (attn.head_to_batch_dim(part) for part in (q, k, v))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=attn.scale)
        heads = torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)
        return attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(heads)))


class AttnProcessor2:
    """The attention of diffusers with the fused function."""

    def __call__(self, attn: "DiffusersAttention", x: Tensor, encoder: Tensor | None) -> Tensor:
        encoder = x if encoder is None else encoder
        q, k, v = attn.to_q(x), attn.to_k(encoder), attn.to_v(encoder)
        q, k, v = (
            p.view(len(x), -1, BLOCK_HEADS, DIM // BLOCK_HEADS).transpose(1, 2) for p in (q, k, v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0)
        joined = heads.transpose(1, 2).reshape(len(x), -1, DIM).to(q.dtype)
        return attn.to_out[1](attn.to_out[0](joined))


class DiffusersAttention(nn.Module):
    def __init__(self, processor: Any, across: int = DIM) -> None:
        super().__init__()
        self.heads, self.scale, self.processor = (
            BLOCK_HEADS,
            (DIM // BLOCK_HEADS) ** -0.5,
            processor,
        )
        self.to_q = nn.Linear(DIM, DIM, bias=False)
        self.to_k, self.to_v = (nn.Linear(across, DIM, bias=False) for _ in range(2))
        self.to_out = nn.ModuleList([nn.Linear(DIM, DIM), nn.Dropout(0.0)])

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        return self.processor(self, hidden_states, encoder_hidden_states)

    def head_to_batch_dim(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        x = x.reshape(B, N, self.heads, C // self.heads).permute(0, 2, 1, 3)
        return x.reshape(B * self.heads, N, C // self.heads)

    def batch_to_head_dim(self, x: Tensor) -> Tensor:
        BH, N, D = x.shape
        x = x.reshape(BH // self.heads, self.heads, N, D).permute(0, 2, 1, 3)
        return x.reshape(BH // self.heads, N, D * self.heads)


class DiffusersBlock(nn.Module):
    """A diffusers block: self-attention, then cross-attention to a text."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(DIM), DiffusersAttention(processor)
        self.norm2, self.attn2 = nn.LayerNorm(DIM), DiffusersAttention(processor, 11)
        self.time = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x) + self.time(temb)) + x
        return self.attn2(self.norm2(x), encoder_hidden_states=encoder_hidden_states) + x


class DiffusersModel(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        blocks = [DiffusersBlock(processor) for _ in range(2)]
        self.down_blocks = nn.ModuleList(blocks[:1])
        self.mid_block = nn.Module()
        self.mid_block.attentions = nn.ModuleList(blocks[1:])

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for block in (*self.down_blocks, *self.mid_block.attentions):
            x = block(x, text, torch.zeros_like(x))
        return x


def test_a_block_of_diffusers_in_both_of_its_paths() -> None:
    fused, written = DiffusersModel(AttnProcessor2()), DiffusersModel(AttnProcessor())
    written.load_state_dict(fused.state_dict())
    tables = [watched(model, PATCHES, TEXT).table() for model in (fused, written)]
    # The text is as long as the image: only its projection distinguishes them.
    names = ["L0.H0", "L1.H0", "cross.L0.H0", "cross.L1.H0"]
    assert [str(head) for head in tables[0].heads[::BLOCK_HEADS]] == names
    assert np.isnan(tables[0].mean("self")[2 * BLOCK_HEADS :]).all()
    assert not np.isnan(tables[0].mean("self")[: 2 * BLOCK_HEADS]).any()
    assert_tables_close(*tables, rtol=1e-4)


class Cached(nn.Module):
    """Decodes with cached keys and values, by the fused function or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.n_heads, self.fused = BLOCK_HEADS, fused
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, BLOCK_HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, new = parts[0], parts[1:]
        self.past = new if self.past is None else torch.cat([self.past, new], dim=3)
        (k, v), T, S = self.past, x.shape[1], self.past.shape[3]
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        else:
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            heads = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("steps", [[7], [3, 1, 2, 1], [1] * 7])
def test_cached_keys_belong_to_their_text(fused: bool, steps: list[int]) -> None:
    model = Cached(fused)
    with torch.no_grad(), observe(model) as whole:
        model(PATCHES)
    model.past = None
    with torch.no_grad(), observe(model) as stepwise:
        for part in PATCHES.split(steps, dim=1):
            model(part)
    assert {head.stack for head in whole.table().heads} == {""}
    assert_tables_close(stepwise.table(), whole.table(), rtol=1e-4)


class PerceiverLayer(nn.Module):
    """Cross-attention from fewer or more latents to the keys of a text."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        q = self.q(latents).unflatten(-1, (BLOCK_HEADS, -1)).transpose(1, 2)
        kv = F.linear(context, self.kv.weight) if self.order == "plain" else self.kv(context)
        k, v = kv.unflatten(-1, (2, BLOCK_HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("order", ["plain", "module"])
@pytest.mark.parametrize("n_latents", [2, 9])
def test_latents_that_read_a_text_use_cross_attention(order: str, n_latents: int) -> None:
    latents = torch.randn(3, n_latents, DIM)
    table = watched(PerceiverLayer(order), latents, PATCHES).table()
    assert {head.stack for head in table.heads} == {"cross"}


# Layers that share keys compute the queries of the last logits alone: of a number, not of indices.


def _texts() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 12))}


def _statistics(model: nn.Module, batch: dict[str, Any], **options: Any) -> HeadTable:
    torch.manual_seed(0)
    with torch.no_grad(), observe(model, Request(per_text=True)) as watch:
        model(**batch, **options)
    return watch.table()


def _are_equal_without_logits(model: nn.Module, batch: dict[str, Any]) -> bool:
    options = without_logits(model)
    assert options
    frames = [_statistics(model, batch, **more).frame() for more in ({}, options)]
    return bool(frames[0].equals(frames[1]))


@pytest.mark.parametrize("model_type", ["gemma4_text", "llama"])
def test_statistics_without_logits_are_those_with_them(model_type: str) -> None:
    model = make_decoder(model_type)
    assert model is not None
    assert _are_equal_without_logits(model, _texts())


@pytest.mark.parametrize(
    ("architectures", "decoders", "least"),
    tiers(
        [], [(SAMPLE, ("gpt2", "gpt_oss", "qwen3_next"), 5)], [(tuple(CASES), tuple(CLASSES), 101)]
    ),
)
def test_statistics_without_logits_of_architectures(
    architectures: Sequence[str], decoders: Sequence[str], least: int
) -> None:
    made = [(name, *CASES[name].make()) for name in architectures]
    made += [(name, make_decoder(name), _texts()) for name in decoders]
    results = {}
    for name, model, batch in made:
        if model is None or not without_logits(model):
            continue
        try:
            _statistics(model, batch)
        except (UnsupportedError, RuntimeError, ValueError):  # no attention, or needs other sizes
            continue
        results[name] = _are_equal_without_logits(model, batch)
    assert [name for name, are_equal in results.items() if not are_equal] == []
    assert len(results) >= least


LAST = ("eager", "headwise"), (1, 3), (0, 4)


@pytest.mark.parametrize(
    ("implementation", "kept", "padding"),
    tiers([("eager", 3, 4), ("headwise", 1, 4)], product(*LAST)),
)
def test_queries_of_the_last_logits_count_at_their_positions(
    implementation: str, kept: int, padding: int
) -> None:
    model = make_decoder("gemma4_text")
    assert model is not None
    set_attention(model, implementation)
    batch = _texts()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :padding] = 0
    table = _statistics(model, batch, logits_to_keep=kept)
    *first, last = hw.attentions(model, batch)
    T = last.shape[2]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    # Each of these queries sees earlier keys, in the longer text and in the shorter one.
    expected = (last * distance)[:, :, T - kept :].sum(-1).mean((0, 2))
    rows = [row for row, head in enumerate(table.heads) if head.layer == len(first)]
    np.testing.assert_allclose(table.mean("distance")[rows], expected, rtol=1e-5)
    assert table.count("distance")[rows].tolist() == [2 * kept] * len(rows)
    whole = _statistics(model, batch)
    assert table.mean("distance")[: rows[0] // 2].tolist() == (
        whole.mean("distance")[: rows[0] // 2].tolist()
    )


def test_later_texts_do_not_continue_those_of_which_the_last_queries_counted() -> None:
    model = make_decoder("gemma4_text")
    assert model is not None
    set_attention(model, "eager")
    ids = _texts()["input_ids"][:1]
    with torch.no_grad(), observe(model, Request(per_text=True), layers=np.array([3])) as watch:
        for tokens in (5, 12):
            model(ids[:, :tokens], logits_to_keep=2)
    assert watch.table().per_text("distance").count[:, 0].tolist() == [2, 2]


class _SharedKeys(nn.Module):
    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, keys).transpose(1, 2).flatten(2)


class _Indexed(nn.Module):
    """Attends with the queries of some logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _SharedKeys()

    def forward(self, inputs_embeds: Tensor, logits_to_keep: Tensor) -> Tensor:
        keys = inputs_embeds.unflatten(-1, (2, 4)).transpose(1, 2)
        return self.layer(inputs_embeds[:, logits_to_keep], keys)


def test_queries_of_indices_are_refused() -> None:
    model, x = _Indexed(), torch.randn(1, 7, 8)
    with (
        pytest.raises(
            UnsupportedError,
            match=r"layer computes 2 of 7 queries, those of logits_to_keep=\[0, 4\]. Leave",
        ),
        observe(model),
    ):
        model(inputs_embeds=x, logits_to_keep=torch.tensor([0, 4]))


def test_a_module_of_a_model_whose_layers_differ_in_heads() -> None:
    model = make_decoder("step3p5")
    assert model is not None
    heads = _statistics(model, _texts()).heads
    assert [sum(head.layer == layer for head in heads) for layer in (0, 1)] == [4, 8]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_rows_of_padding_that_a_mask_hides_from_all_keys(side: str, implementation: str) -> None:
    model = zoo.make("Llama")
    set_attention(model, implementation)
    ids, real = torch.randint(3, 20, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    real[1, slice(3) if side == "left" else slice(4, 7)] = False
    visible = real[:, None, :, None] & real[:, None, None] & torch.ones(7, 7).tril().bool()
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    masks = {"attention_mask": added}, {"attention_mask": real.long()}
    positions = torch.arange(7).expand(2, 7)
    by_added, by_real = (
        _statistics(model, {"input_ids": ids, "position_ids": positions, **mask}) for mask in masks
    )
    assert by_added.count("lse").tolist() == by_real.count("lse").tolist()
    np.testing.assert_allclose(by_added.mean("lse"), by_real.mean("lse"), rtol=1e-6)
