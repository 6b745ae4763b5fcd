"""A softmax is attention if it weighs the tokens of a text; routers and mixtures are listed."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw
from headwise.watch import Request, observe
from small_attention import SmallAttention
from tiers import crossed, diagonal, tiers

D_MODEL, HEADS, N = 12, 4, 3  # N experts, streams or layers


class Mixture(nn.Module):
    """Weighs something other than tokens, in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router, self.streams = nn.Linear(D_MODEL, N), nn.Linear(D_MODEL, N * D_MODEL)
        self.mixing, self.stream_mixing = nn.Linear(D_MODEL, N * N), nn.Parameter(torch.randn(N, N))
        self.experts = nn.Parameter(torch.randn(N, D_MODEL))
        self.q, self.k = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.way)(x, self.streams(x).unflatten(-1, (N, D_MODEL)))

    def experts_by_a_layer(self, x: Tensor, _: Tensor) -> Tensor:
        return self.router(x).softmax(-1) @ self.experts

    def experts_by_a_product(self, x: Tensor, _: Tensor) -> Tensor:
        return torch.einsum("bte,ed->btd", (x @ self.experts.mT).softmax(-1), self.experts)

    def outputs_of_experts(self, x: Tensor, streams: Tensor) -> Tensor:
        return (self.router(x).softmax(-1)[:, :, None] @ streams).squeeze(2)

    def outputs_of_some_experts(self, x: Tensor, streams: Tensor) -> Tensor:
        logits = x @ self.experts.mT
        logits = logits.masked_fill(logits < logits.mean(-1, keepdim=True), -torch.inf)
        return torch.einsum("bte,bted->btd", logits.softmax(-1), streams)

    def streams_of_each_token(self, x: Tensor, streams: Tensor) -> Tensor:
        weights = self.mixing(x).unflatten(-1, (N, N)).softmax(-1) + 1e-3
        for _ in range(3):  # Sinkhorn
            weights = weights / weights.sum(-2, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.mT @ streams).sum(2)

    def streams_of_all_tokens(self, _: Tensor, streams: Tensor) -> Tensor:
        return (self.stream_mixing.expand(1, 1, N, N).softmax(-1) @ streams).sum(2)

    def layers_for_all_tokens(self, _: Tensor, streams: Tensor) -> Tensor:
        return (streams * self.stream_mixing[0].softmax(0)[:, None]).sum(2)

    def gates(self, x: Tensor, _: Tensor) -> Tensor:
        return x * x.softmax(-1)


class MixtureByAttention(Mixture):
    """Attention among the streams of each token."""

    def by_hand(self, _: Tensor, streams: Tensor) -> Tensor:
        return ((self.q(streams) @ self.k(streams).mT).softmax(-1) @ streams).sum(2)

    def fused(self, _: Tensor, streams: Tensor) -> Tensor:
        q, k = self.q(streams), self.k(streams)
        return F.scaled_dot_product_attention(q, k, streams).sum(2)

    def from_the_last_stream(self, x: Tensor, streams: Tensor) -> Tensor:
        logits = self.q(x)[:, :, None] @ self.k(streams).mT
        return (logits.softmax(-1) @ streams).squeeze(2)

    def rows_of_streams(self, x: Tensor, streams: Tensor) -> Tensor:
        rows = streams.flatten(0, 1)
        logits = self.q(x).view(-1, 1, D_MODEL) @ self.k(rows).mT
        return (logits.softmax(-1) @ rows).view_as(x)


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    way: lambda way=way, kind=kind: kind(way)  # type: ignore[misc]
    for kind in (Mixture, MixtureByAttention)
    for way in vars(kind)
    if way not in ("forward", "__init__") and callable(vars(kind)[way])
}


class ModelWithMixtures(nn.Module):
    """Two layers of attention; what a mixture gives has no effect."""

    def __init__(self, mixture: str | None, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SmallAttention(D_MODEL, HEADS, by_hand=not fused) for _ in range(2)
        )
        self.mixtures = nn.ModuleList([MIXTURES[mixture]() for _ in range(2)] if mixture else [])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if len(self.mixtures):
                x = x + 0 * self.mixtures[number](x)
            x = x + layer(x)
        return x


def _models(mixture: str, fused: bool) -> tuple[nn.Module, nn.Module]:
    """A model with a mixture in each layer, and the same model without."""
    torch.manual_seed(0)
    model, plain = ModelWithMixtures(mixture, fused).eval(), ModelWithMixtures(None, fused).eval()
    plain.layers.load_state_dict(model.layers.state_dict())
    return model, plain


def _table(model: nn.Module, *batches: Tensor) -> tuple[hw.HeadTable, list[Any]]:
    with torch.no_grad():
        expected = [model(x) for x in batches]
        with hw.observe(model) as watch:
            assert all(torch.equal(model(x), y) for x, y in zip(batches, expected, strict=True))
    return watch.table(), watch.sites()


@pytest.mark.parametrize(("mixture", "fused"), crossed(MIXTURES, (False, True)))
def test_heads_beside_another_softmax_are_those_without_it(mixture: str, fused: bool) -> None:
    """Whatever the softmax weighs, and also where there are as many tokens as it weighs."""
    model, plain = _models(mixture, fused)
    batches = [torch.randn(2, n, D_MODEL) for n in (7, 2, N) if n != N or mixture in vars(Mixture)]
    (table, sites), (known, known_sites) = _table(model, *batches), _table(plain, *batches)
    assert table.heads == known.heads
    np.testing.assert_array_equal(table.covered, known.covered)
    for name in known.statistics:
        np.testing.assert_array_equal(table.mean(name), known.mean(name), err_msg=name)
    n = len(known_sites)
    assert [site.name for site in sites[:n]] == [site.name for site in known_sites]
    others = {site.name: site.reason for site in sites[n:]}
    assert others.keys() == {"mixtures.0", "mixtures.1"}
    by_attention = mixture in vars(MixtureByAttention)
    why = f"attends among {N} positions" if by_attention else "a softmax that is not attention"
    assert all(reason.startswith(why) for reason in others.values()), others


@pytest.mark.parametrize(
    "mixture", ["experts_by_a_layer", "streams_of_each_token", "by_hand", "fused"]
)
def test_heads_beside_another_softmax_are_ablated_and_cut(mixture: str) -> None:
    model, plain = _models(mixture, fused=False)
    x = torch.randn(2, 7, D_MODEL)
    with torch.no_grad(), hw.ablate(plain, "L1.H2", reference=[x]):
        expected = plain(x)
    with torch.no_grad(), hw.ablate(model, "L1.H2", reference=[x]):
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(hw.prune(model, "L1.H2", reference=[x])(x), expected)


def test_hyper_connections_of_a_hugging_face_model_are_listed() -> None:
    config = transformers.DeepseekV4Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32,
        vocab_size=23, max_position_embeddings=64, head_dim=12, qk_rope_head_dim=4, q_lora_rank=12,
        o_groups=2, o_lora_rank=6, index_n_heads=2, index_head_dim=8, index_topk=4,
        sliding_window=4, hc_mult=N, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, mlp_layer_types=["moe"] * 2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for n_tokens in (7, HEADS, N):
        with torch.no_grad(), hw.observe(model) as watch:
            model(torch.arange(3, 3 + n_tokens)[None])
        sites = [site.name for site in watch.sites() if site.n_heads]
        assert sites == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
        assert [str(head) for head in watch.table().heads[::HEADS]] == ["L0.H0", "L1.H0"]
        others = {site.name: site.reason for site in watch.sites() if not site.n_heads}
        assert others["model.layers.0.attn_hc"] == "a softmax that is not attention"


# A float mask of zeros and ones is added to the logits, by the model and by a watch.


MASK = torch.ones(5, 5).tril()


class AddedMaskAttention(nn.Module):
    """Attention whose float mask is added, as `scaled_dot_product_attention` adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(q, q, q, attn_mask=MASK)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_mask_of_zeros_and_ones_is_watched_as_added(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    model = AddedMaskAttention() if kind == "function" else layer
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), hw.observe(model) as watch:
        if kind == "function":
            model(x)
            q = k = x.unflatten(-1, (2, 4)).transpose(1, 2)
        else:
            model(x, x, x, attn_mask=MASK)
            q, k, _ = (x @ layer.in_proj_weight.T).unflatten(-1, (3, 2, 4)).unbind(-3)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
    weights = (q @ k.mT / 2 + MASK).softmax(-1)
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    entropy = torch.tensor(watch.table().mean("entropy"), dtype=torch.float32)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-5)


# Heads with huge logits: only keys that the mask hides count as hidden.


B, T, SATURATED_HEADS, WIDTH = 2, 9, 4, 5
LENGTHS = (9, 6)
LOWEST = torch.finfo(torch.float32).min
# A logit this far below another has no weight in any precision.
NONE = -104.0


class MaskedAttention(nn.Module):
    """Attention implemented by hand, masked in one of the usual ways."""

    num_heads = SATURATED_HEADS

    def __init__(self, way: str, constant: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(20, 60)
        self.way, self.constant, self.scale = way, constant, 1.0
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, SATURATED_HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (self.scale / math.sqrt(WIDTH))
        scores = scores if allowed is None else getattr(self, self.way)(scores, allowed)
        self.logits.append(scores.detach().clone())
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)

    def fill(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, self.constant)

    def fill_in_place(self, scores: Tensor, allowed: Tensor) -> Tensor:
        rows = scores.flatten(0, 1)
        rows.masked_fill_(~allowed.expand(scores.shape).flatten(0, 1), self.constant)
        return scores

    def assign(self, scores: Tensor, allowed: Tensor) -> Tensor:
        scores[~allowed.expand(scores.shape)] = self.constant
        return scores

    def where(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return torch.where(allowed, scores, torch.tensor(self.constant, dtype=scores.dtype))

    def where_method(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.where(allowed, torch.full_like(scores, self.constant))

    def where_filled(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return torch.where(allowed, scores, torch.full_like(scores, self.constant))

    def add(self, scores: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=scores.dtype)
        return scores + mask.masked_fill(~allowed, self.constant)

    def subtract(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores - (1.0 - allowed.to(scores.dtype)) * -self.constant

    def multiply(self, scores: Tensor, allowed: Tensor) -> Tensor:
        allowed = allowed.to(scores.dtype)
        return scores * allowed + self.constant * (1 - allowed)

    def twice(self, scores: Tensor, allowed: Tensor) -> Tensor:
        causal = torch.ones(T, T).tril().to(scores.dtype)
        scores = scores + (1 - causal) * self.constant
        return scores + (1.0 - allowed[:, :, -1:].to(scores.dtype)) * self.constant

    def in_one_product(self, scores: Tensor, allowed: Tensor) -> Tensor:
        mask = (1.0 - allowed.to(scores.dtype)) * self.constant
        rows = scores.flatten(0, 1)
        identity = torch.eye(T, dtype=scores.dtype).expand(len(rows), T, T)
        mask = mask.expand(scores.shape).flatten(0, 1)
        return torch.baddbmm(mask, rows, identity).unflatten(0, scores.shape[:2])

    def with_bias(self, scores: Tensor, allowed: Tensor) -> Tensor:
        bias = (
            torch.linspace(-8, 8, SATURATED_HEADS * T * T)
            .view(1, SATURATED_HEADS, T, T)
            .to(scores.dtype)
        )
        mask = (1.0 - allowed.to(scores.dtype)) * self.constant
        return scores + (bias + mask)

    def keys_first(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.mT.masked_fill(~allowed.mT, self.constant).transpose(-1, -2)


class MaskedModel(nn.Module):
    def __init__(self, way: str, constant: float) -> None:
        super().__init__()
        self.attention = MaskedAttention(way, constant)

    def forward(self, x: Tensor, allowed: Tensor, attention_mask: Tensor) -> Tensor:
        return self.attention(x, allowed)


WAYS = (
    "fill", "fill_in_place", "assign", "where", "where_method", "where_filled", "add", "subtract",
    "multiply", "twice", "in_one_product", "with_bias", "keys_first",
)  # fmt: skip


def _texts(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, what each query may attend to (causal, and itself), and what is no padding."""
    x = torch.randn(B, T, 20, generator=torch.Generator().manual_seed(1)) * 2
    positions, lengths = torch.arange(T), torch.tensor(LENGTHS)[:, None]
    real = positions < lengths if side == "right" else positions >= T - lengths
    allowed = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None, None, :]
    return x, allowed, real


def _rows(logits: Tensor, allowed: Tensor, real: Tensor) -> Iterator[dict[str, np.ndarray]]:
    """The statistics of each counted query and head, from the materialised weights."""
    logits = logits.double()
    leaks = logits - logits.amax(-1, keepdim=True) > NONE
    visible = allowed.expand(logits.shape) | (leaks & allowed.any(-1, keepdim=True))
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    for text, query in real.nonzero().tolist():
        first = int(real[text].int().argmax())
        row, visible_row = weights[text, :, query].numpy(), visible[text, :, query].numpy()
        several = visible_row.sum(-1) > 1
        logs = np.log(np.where(row > 0, row, 1.0))
        keys = {"first": first, "self": query, "previous": query - 1}
        yield {
            "entropy": np.where(several, -(row * logs).sum(-1), np.nan),
            "max_weight": np.where(several, row.max(-1), np.nan),
            **{
                name: np.where(several & visible_row[:, key] & (key >= first), row[:, key], np.nan)
                for name, key in keys.items()
            },
        }


STATISTICS = ("entropy", "max_weight", "first", "self", "previous")


def _check(
    model: MaskedModel, side: str, scales: list[float], dtype: torch.dtype, rtol: float
) -> None:
    x, allowed, real = _texts(side)
    model = model.to(dtype)
    with torch.no_grad(), observe(model, Request(statistics=STATISTICS)) as watch:
        for scale in scales:
            model.attention.scale = scale
            model(x.to(dtype), allowed, attention_mask=real.long())
    rows = [row for logits in model.attention.logits for row in _rows(logits, allowed, real)]
    for name in STATISTICS:
        values = np.stack([row[name] for row in rows])
        counted = (~np.isnan(values)).sum(0)
        np.testing.assert_array_equal(watch.table().count(name), counted, err_msg=name)
        theirs = np.nanmean(values, axis=0)
        ours = watch.table().mean(name)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol, err_msg=name)


CONSTANTS = (LOWEST, -1e9, -65500.0, -1e4)


@pytest.mark.parametrize(
    ("way", "constant", "side"),
    tiers(diagonal(WAYS, CONSTANTS, ("right", "left")), product(WAYS, CONSTANTS, ("right",))),
)
def test_keys_of_zero_weight_count_as_visible_unless_masked(
    way: str, constant: float, side: str
) -> None:
    for scale in (1.0, 1e3, 1e4, 1e6):
        _check(MaskedModel(way, constant), side, [scale], torch.float32, 1e-5)


@pytest.mark.parametrize("way", ["fill", "add"])
def test_a_watch_survives_an_entropy_collapse(way: str) -> None:
    _check(MaskedModel(way, -1e4), "right", [1.0, 30.0, 1e3, 1e5, 1e6], torch.float32, 1e-5)


HALF = ("fill", "add", "multiply", "with_bias"), (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("way", "dtype"), crossed(*HALF))
def test_half_precision_counts_keys_down_to_its_smallest_weight(
    way: str, dtype: torch.dtype
) -> None:
    for constant in (torch.finfo(dtype).min, -1e4):
        for scale in (1.0, 1e2, 1e3):
            _check(MaskedModel(way, constant), "right", [scale], dtype, 1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_mask_every_key_is_visible(scale: float, dtype: torch.dtype) -> None:
    model = MaskedAttention("fill", 0.0).to(dtype)
    x = _texts("right")[0].to(dtype)
    model.scale = scale
    with torch.no_grad(), observe(model, Request(statistics=STATISTICS)) as watch:
        model(x, None)
    everything = torch.ones(B, 1, T, T, dtype=torch.bool), torch.ones(B, T, dtype=torch.bool)
    rows = list(_rows(model.logits[0], *everything))
    for name in STATISTICS:
        values = np.stack([row[name] for row in rows])
        assert (watch.table().count(name) == (~np.isnan(values)).sum(0)).all(), name
        ours = watch.table().mean(name)
        np.testing.assert_allclose(ours, np.nanmean(values, axis=0), rtol=1e-3, atol=1e-3)
