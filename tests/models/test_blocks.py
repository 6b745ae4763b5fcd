"""Blocks of timm and diffusers in both of their paths, with the owners of their keys."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.tables import HeadTable
from headwise.watch import observe

DIM, HEADS = 20, 4
X = torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(1))  # as many tokens


class TimmAttention(nn.Module):
    """The attention of timm's vision transformer."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.scale, self.fused_attn = self.head_dim**-0.5, fused
        self.qkv = nn.Linear(DIM, DIM * 3)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
        self.attn_drop, self.norm = nn.Dropout(0.0), nn.Identity()
        self.proj, self.proj_drop = nn.Linear(DIM, DIM), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn if attn_mask is None else attn + attn_mask
            attn = attn.softmax(dim=-1)
            x = self.attn_drop(attn) @ v
        x = self.norm(x.transpose(1, 2).reshape(B, N, C))
        return self.proj_drop(self.proj(x))


class TimmBlock(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), TimmAttention(fused)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm1(x), attn_mask=attn_mask)


class TimmModel(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TimmBlock(fused), TimmBlock(fused)])

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


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
        q, k, v = (p.view(len(x), -1, HEADS, DIM // HEADS).transpose(1, 2) for p in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0)
        joined = heads.transpose(1, 2).reshape(len(x), -1, DIM).to(q.dtype)
        return attn.to_out[1](attn.to_out[0](joined))


class DiffusersAttention(nn.Module):
    def __init__(self, processor: Any, across: int = DIM) -> None:
        super().__init__()
        self.heads, self.scale, self.processor = HEADS, (DIM // HEADS) ** -0.5, processor
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


def _watched(model: nn.Module, *inputs: Any) -> HeadTable:
    model.eval()
    with torch.no_grad():
        plain = model(*inputs)
        with observe(model) as watch:
            assert torch.equal(model(*inputs), plain)
    return watch.table()


def _assert_alike(first: HeadTable, second: HeadTable, but: tuple[str, ...] = ()) -> None:
    assert first.heads == second.heads
    for name in set(first.statistics) - set(but):
        np.testing.assert_array_equal(first.count(name), second.count(name), err_msg=name)
        np.testing.assert_allclose(first.mean(name), second.mean(name), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("masked", [False, True])
def test_a_vision_transformer_of_timm_in_both_of_its_paths(masked: bool) -> None:
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(3) > 0, -torch.inf)
    fused, written = TimmModel(fused=True), TimmModel(fused=False)
    written.load_state_dict(fused.state_dict())
    tables = [_watched(model, X, mask if masked else None) for model in (fused, written)]
    assert {head.stack for head in tables[0].heads} == {""}
    _assert_alike(*tables)


def test_a_block_of_diffusers_in_both_of_its_paths() -> None:
    fused, written = DiffusersModel(AttnProcessor2()), DiffusersModel(AttnProcessor())
    written.load_state_dict(fused.state_dict())
    tables = [_watched(model, X, TEXT) for model in (fused, written)]
    # The text is as long as the image: only its projection distinguishes them.
    names = ["L0.H0", "L1.H0", "cross.L0.H0", "cross.L1.H0"]
    assert [str(head) for head in tables[0].heads[::HEADS]] == names
    assert np.isnan(tables[0].mean("self")[2 * HEADS :]).all()
    assert not np.isnan(tables[0].mean("self")[: 2 * HEADS]).any()
    _assert_alike(*tables)


class Cached(nn.Module):
    """Decodes with cached keys and values, by the fused function or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.n_heads, self.fused = HEADS, fused
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
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
        model(X)
    model.past = None
    with torch.no_grad(), observe(model) as stepwise:
        for part in X.split(steps, dim=1):
            model(part)
    actual, expected = stepwise.table(), whole.table()
    assert {head.stack for head in actual.heads} == {""}
    _assert_alike(actual, expected)


class PerceiverLayer(nn.Module):
    """Cross-attention from fewer or more latents to the keys of a text."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        q = self.q(latents).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        kv = F.linear(context, self.kv.weight) if self.order == "plain" else self.kv(context)
        k, v = kv.unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("order", ["plain", "module"])
@pytest.mark.parametrize("n_latents", [2, 9])
def test_latents_that_read_a_text_use_cross_attention(order: str, n_latents: int) -> None:
    latents = torch.randn(3, n_latents, DIM)
    table = _watched(PerceiverLayer(order), latents, X)
    assert {head.stack for head in table.heads} == {"cross"}
