"""Attention that models implement by hand, in the usual ways."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.watch import Request, observe
from oracles import assert_tables_close, means, modules_of

D_MODEL, HEADS, WIDTH = 20, 4, 5


class CausalSelfAttention(nn.Module):
    """The attention of nanoGPT: fused if torch supports it, else by hand."""

    def __init__(self, flash: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.c_proj = nn.Linear(D_MODEL, D_MODEL)
        self.attn_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout, self.flash = HEADS, D_MODEL, dropout, flash
        mask = torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16)
        self.register_buffer("bias", mask)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            self.weights = att.detach()
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(D_MODEL), CausalSelfAttention(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln_1(x))


X = torch.randn(3, 7, D_MODEL, generator=torch.Generator().manual_seed(0)) * 3


def test_nanogpt_is_watched_in_both_of_its_paths() -> None:
    model = nn.Sequential(Block(), Block())
    fused = nn.Sequential(Block(flash=True), Block(flash=True))
    fused.load_state_dict(model.state_dict())
    before = modules_of(model)
    with torch.no_grad():
        plain = model(X)
        with observe(model, Request(maps=True)) as watch, observe(fused) as known:
            watched = model(X)
            fused(X)
            for head in range(HEADS):
                torch.testing.assert_close(watch.weights((0, head)), model[0].attn.weights[:, head])
    assert torch.equal(plain, watched)
    for layer, block in enumerate(model):
        rows = slice(HEADS * layer, HEADS * (layer + 1))
        for name, theirs in means([w.numpy() for w in block.attn.weights]).items():
            np.testing.assert_allclose(watch.table().mean(name)[rows], theirs, rtol=1e-5)
        block.attn.weights = None
    assert modules_of(model).keys() == before.keys()
    assert [site.name for site in watch.sites()] == ["0.attn", "1.attn"]
    assert_tables_close(watch.table(), known.table(), rtol=1e-5, atol=1e-6)


class Ways(nn.Module):
    """The same attention, implemented in one of many ways."""

    num_heads = HEADS

    def __init__(self, way: str, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.way = way
        self.q = nn.Linear(D_MODEL, D_MODEL)
        self.k = nn.Linear(D_MODEL, kv_heads * WIDTH)
        self.v = nn.Linear(D_MODEL, kv_heads * WIDTH)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)) for p in (self.q, self.k, self.v))
        return getattr(self, self.way)(q, k, v).flatten(2)

    def matmul(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = torch.softmax(torch.matmul(q, k.mT) / math.sqrt(WIDTH), dim=-1)
        return torch.matmul(weights, v).transpose(1, 2)

    def bmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        weights = self.softmax(torch.bmm(q, k.mT) * WIDTH**-0.5)
        return torch.bmm(weights, v).unflatten(0, (-1, HEADS)).transpose(1, 2)

    def baddbmm(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        scores = torch.baddbmm(q.new_zeros(()), q, k.mT, beta=0, alpha=WIDTH**-0.5)
        weights = F.softmax(scores.unflatten(0, (-1, HEADS)), dim=-1, dtype=torch.float32)
        return torch.bmm(weights.flatten(0, 1), v).unflatten(0, (-1, HEADS)).transpose(1, 2)

    def baddbmm_to_a_mask(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        mask = q.new_zeros(q.shape[1], k.shape[1])  # as a mask that hides nothing
        scores = torch.baddbmm(mask, q, k.mT, alpha=WIDTH**-0.5)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS)).transpose(1, 2)

    def einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * WIDTH**-0.5
        return torch.einsum("bhqk, bkhd -> bqhd", scores.softmax(-1), v)

    def transposed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.mT).div(math.sqrt(WIDTH)).softmax(dim=-1)
        return (v.mT @ weights.mT).mT.transpose(1, 2)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
        k, v = (x.transpose(1, 2)[:, :, None] for x in (k, v))
        heads = (q @ k.mT * WIDTH**-0.5).softmax(-1) @ v
        return heads.flatten(1, 2).transpose(1, 2)

    def shared(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT * WIDTH**-0.5).softmax(-1) @ v).transpose(1, 2)


KV_HEADS = {"grouped": 2, "shared": 1}
WAYS = ("bmm", "baddbmm", "baddbmm_to_a_mask", "einsum", "transposed", "grouped", "shared")


def _as_usual(model: Ways) -> Ways:
    """The same weights with repeated key and value heads, in the most usual way."""
    usual = Ways("matmul")
    for ours, theirs in zip(usual.parameters(), model.parameters(), strict=True):
        times = len(ours) // len(theirs)
        repeated = theirs.unflatten(0, (-1, WIDTH)).repeat_interleave(times, 0).flatten(0, 1)
        ours.data.copy_(repeated)
    return usual


@pytest.mark.parametrize("way", WAYS)
def test_every_implementation_gives_the_same_table(way: str) -> None:
    model = Ways(way, KV_HEADS.get(way, HEADS))
    usual = _as_usual(model)
    with torch.no_grad(), observe(model) as watch, observe(usual) as known:
        torch.testing.assert_close(model(X), usual(X))
    table = watch.table()
    group = HEADS // KV_HEADS.get(way, HEADS)
    assert table.kv_heads.tolist() == [head // group for head in range(HEADS)]
    assert_tables_close(table, known.table(), rtol=1e-5)


def test_a_logit_with_a_bias_is_not_mistaken_for_the_plain_logit() -> None:
    class Biased(Ways):
        def matmul(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            scores = q @ k.mT
            if self.way == "matmul":
                scores = scores + torch.arange(7.0)
            return (scores.softmax(-1) @ v).transpose(1, 2)

        def in_place(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            scores = q @ k.mT
            scores += torch.arange(7.0)
            return (scores.softmax(-1) @ v).transpose(1, 2)

    for way in ("matmul", "in_place"):
        model = Biased(way)
        with torch.no_grad(), observe(model) as watch:
            model(X)
        assert np.isnan(watch.table().mean("max_logit")).all()
        assert not np.isnan(watch.table().mean("lse")).any()
