"""Attention layers of other libraries, each as a function of its input alone."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.layer import MultiHeadAttention, RoPE

Peer = tuple[nn.Module, Callable[[Tensor], Tensor]]


class Fused(nn.Module):
    """A handwritten layer: one matrix for Q, K and V, torch's attention, one output matrix."""

    def __init__(self, d_model: int, n_heads: int, causal: bool) -> None:
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d_model = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(heads.transpose(1, 2).reshape(B, T, d_model))


def peers(d_model: int, n_heads: int, causal: bool, T: int) -> dict[str, Peer]:
    """All layers that support the case; `x-transformers` if it is installed."""
    fused = Fused(d_model, n_heads, causal)
    ours = MultiHeadAttention(d_model, n_heads)
    layers: dict[str, Peer] = {
        "headwise": (ours, lambda x: ours(x, causal=causal)),
        "plain fused layer": (fused, fused),
    }
    if causal:
        rotated = MultiHeadAttention(d_model, n_heads, rope=RoPE(d_model // n_heads))
        layers["headwise, RoPE"] = (rotated, lambda x: rotated(x, causal=True))
        layers["Hugging Face Llama, sdpa"] = _llama(d_model, n_heads, "sdpa", T)
        layers["Hugging Face Llama, eager"] = _llama(d_model, n_heads, "eager", T)
    else:
        layers["headwise, per-head weights"] = (ours, lambda x: ours(x, need_weights=True)[0])
        layers["Hugging Face BERT, sdpa"] = _bert(d_model, n_heads)
        layers |= _torch(d_model, n_heads)
    if importlib.util.find_spec("x_transformers") is not None:
        layers["x-transformers, flash"] = _x_transformers(d_model, n_heads, causal)
    return layers


def _torch(d_model: int, n_heads: int) -> dict[str, Peer]:
    layer = nn.MultiheadAttention(d_model, n_heads, bias=False, batch_first=True)
    name = "nn.MultiheadAttention"
    return {
        name: (layer, lambda x: layer(x, x, x, need_weights=False)[0]),
        f"{name}, per-head weights": (
            layer,
            lambda x: layer(x, x, x, need_weights=True, average_attn_weights=False)[0],
        ),
    }


def _llama(d_model: int, n_heads: int, kernel: str, T: int) -> Peer:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=d_model, num_attention_heads=n_heads, num_key_value_heads=n_heads
    )
    config._attn_implementation = kernel
    layer, rope = LlamaAttention(config, layer_idx=0), LlamaRotaryEmbedding(config)
    hidden = torch.full((T, T), -torch.inf).triu(1)[None, None]

    def run(x: Tensor) -> Tensor:
        angles = rope(x, torch.arange(T, device=x.device)[None])
        mask = hidden.to(x) if kernel == "eager" else None  # sdpa: the kernel's causal flag
        return layer(x, angles, mask)[0]

    return layer, run


def _bert(d_model: int, n_heads: int) -> Peer:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(
        hidden_size=d_model, num_attention_heads=n_heads, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = "sdpa"
    # BERT's output module also adds the residual and normalises; only its matrix is timed.
    modules = nn.ModuleList([BertSelfAttention(config), nn.Linear(d_model, d_model)])
    return modules, lambda x: modules[1](modules[0](x)[0])


def _x_transformers(d_model: int, n_heads: int, causal: bool) -> Peer:
    from x_transformers.x_transformers import Attention

    layer = Attention(
        d_model, heads=n_heads, dim_head=d_model // n_heads, flash=True, causal=causal
    )
    return layer, layer
