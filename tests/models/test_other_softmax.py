"""A softmax is attention if it weighs the tokens of a text; routers and mixtures are listed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw

D_MODEL, HEADS, N = 12, 4, 3  # N experts, streams or layers


class AttentionBesideMixtures(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = HEADS, fused
        self.qkv, self.out_proj = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            heads = (q @ k.mT * 3**-0.5).softmax(-1) @ v
        return self.out_proj(heads.transpose(1, 2).flatten(2))


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
            [AttentionBesideMixtures(fused), AttentionBesideMixtures(fused)]
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


@pytest.mark.parametrize("fused", [False, True], ids=["by hand", "fused"])
@pytest.mark.parametrize("mixture", MIXTURES)
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
    others = {site.name: site.watched for site in sites[n:]}
    assert others.keys() == {"mixtures.0", "mixtures.1"}
    by_attention = mixture in vars(MixtureByAttention)
    why = f"not supported: attends among {N} positions" if by_attention else "not watched: "
    assert all(watched.startswith(why) for watched in others.values()), others
    if not by_attention:
        assert set(others.values()) == {"not watched: a softmax that is not attention"}


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
        others = {site.name: site.watched for site in watch.sites() if not site.n_heads}
        assert others["model.layers.0.attn_hc"] == "not watched: a softmax that is not attention"
