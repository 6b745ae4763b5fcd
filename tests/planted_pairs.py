"""Encoder-decoders with known alignments."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from headwise.roles import AlignedBatch
from oracles import padded


def sharp_t5() -> nn.Module:
    """A tiny T5 whose attention is far from even."""
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=60, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q.weight", "k.weight")):
                weight.mul_(4.0)
    return model


class PlantedPairs(nn.Module):
    """An encoder-decoder built by hand: one head attends to the letter that is written next.

    The decoder writes each letter `n` of the source as `n + 20`; the letters of a source differ.
    """

    def __init__(self, heads: int = 4, planted: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=True, max_position_embeddings=48)
        self.generation_config = GenerationConfig()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Module()])
        torch.manual_seed(0)
        attention = _CrossAttention(heads, planted)
        self.decoder.layers[0].encoder_attn = attention

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
    ) -> Tensor:
        assert decoder_input_ids is not None
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        before = nn.functional.pad(input_ids, (1, 0))[:, :-1]
        return self.decoder.layers[0].encoder_attn(decoder_input_ids, before, mask)

    def _shift_right(self, ids: Tensor) -> Tensor:
        return nn.functional.pad(ids, (1, 0))[:, :-1]


class _CrossAttention(nn.Module):
    def __init__(self, heads: int, planted: int) -> None:
        super().__init__()
        self.q = nn.Parameter(0.3 * torch.randn(heads, 64, 16))
        self.k = nn.Parameter(0.3 * torch.randn(heads, 64, 16))
        with torch.no_grad():
            letters = torch.randn(64, 16)
            self.k[planted] = letters
            self.q[planted] = 3.0 * torch.cat([letters[:1], letters[:-1]])
            self.q[planted][21:41] = 3.0 * letters[1:21]

    def forward(self, outputs: Tensor, before: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (
            table[:, ids].transpose(0, 1) for table, ids in ((self.q, outputs), (self.k, before))
        )
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def spelled(n: int, seed: int) -> AlignedBatch:
    rng = np.random.default_rng(seed)
    sources = [(1 + rng.permutation(20)[: rng.integers(3, 9)]).tolist() for _ in range(n)]
    batch = padded(sources, "right")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    outputs = [[letter + 20 for letter in source] for source in sources]
    spans: list[Any] = [[(place, place + 1) for place in range(len(s))] for s in sources]
    return AlignedBatch(inputs, outputs, spans)
