"""Torch's own layers are pruned, and their callers need no change."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise import ablate, observe, prune

B, T, S, H = 3, 5, 7, 4
GONE = [(0, 1), (0, 3)]
LENGTHS = (5, 2, 4)
DRAWN = torch.Generator().manual_seed(5)
X, MEMORY = (torch.randn(B, n, 12, generator=DRAWN, dtype=torch.float64) for n in (T, S))
PADDING = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]  # True = padding
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)  # True = hidden
OF_HEADS = torch.rand(B * H, T, T, generator=DRAWN) < 0.3
OF_HEADS[..., 0] = False  # every query sees a key

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "both": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "of heads": {"attn_mask": OF_HEADS},
    "added": {
        "attn_mask": torch.randn(B * H, T, T, generator=DRAWN, dtype=torch.float64),
        "key_padding_mask": torch.zeros(B, T).double().masked_fill(PADDING, float("-inf")),
    },
}


def _layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(12, H, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for bias in layer.parameters():
            bias.add_(0.3 * torch.randn_like(bias))
    return layer


@pytest.mark.parametrize("call", sorted(CALLS))
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "tokens first"])
@torch.no_grad()
def test_a_pruned_layer_equals_the_ablated_one_under_every_mask(call: str, first: bool) -> None:
    layer = _layer(batch_first=first)
    x = X if first else X.transpose(0, 1)
    with ablate(layer, GONE):
        expected, _ = layer(x, x, x, **CALLS[call])
    small = prune(layer, GONE)
    output, weights = small(x, x, x, **CALLS[call])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    of_all = layer(x, x, x, **CALLS[call], average_attn_weights=False)[1]
    torch.testing.assert_close(weights, of_all[:, [0, 2]].mean(1), rtol=0, atol=1e-12)
    assert small(x, x, x, **CALLS[call], need_weights=False)[1] is None
    of_each = small(x, x, x, **CALLS[call], average_attn_weights=False)[1]
    torch.testing.assert_close(of_each, of_all[:, [0, 2]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"bias": False}, {"kdim": 6, "vdim": 10}])
@torch.no_grad()
def test_layers_of_every_configuration(options: dict[str, Any]) -> None:
    layer = _layer(batch_first=True, **options)
    key, value = (MEMORY[..., : options.get(name, 12)] for name in ("kdim", "vdim"))
    with ablate(layer, GONE):
        expected, _ = layer(X, key, value)
    small = prune(layer, GONE)
    output, weights = small(X, key, value, average_attn_weights=False)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    of_all = layer(X, key, value, average_attn_weights=False)[1]
    torch.testing.assert_close(weights, of_all[:, [0, 2]], rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_single_text() -> None:
    layer = _layer()
    with ablate(layer, GONE):
        expected, _ = layer(X[0], X[0], X[0], key_padding_mask=PADDING[1])
    output, weights = prune(layer, GONE)(X[0], X[0], X[0], key_padding_mask=PADDING[1])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert weights.shape == (T, T)


@torch.no_grad()
def test_a_layer_can_be_pruned_again_and_takes_masks_of_all_heads() -> None:
    layer = _layer(batch_first=True)
    twice = prune(prune(layer, [(0, 1)]), [(0, 2)])  # the fourth head is now the third
    with ablate(layer, GONE):
        expected, _ = layer(X, X, X, attn_mask=OF_HEADS)
    torch.testing.assert_close(twice(X, X, X, attn_mask=OF_HEADS)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("fold", [None, "mean"])
@torch.no_grad()
def test_an_encoder(nested: bool, fold: Any) -> None:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(12, H, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    gone = {0: [1, 3], 1: [0]}
    reference = [(X,)] if fold else None
    small = prune(model, gone, fold=fold, reference=reference)
    with ablate(model, gone, fold or "zero", reference):
        expected = model(X, src_key_padding_mask=PADDING)
    output = small(X, src_key_padding_mask=PADDING)
    torch.testing.assert_close(output[~PADDING], expected[~PADDING], rtol=0, atol=1e-12)
    with observe(small) as watch:
        small(X)
    assert [head.head for head in watch.table().heads] == [0, 1, 0, 1, 2]
    assert sum(x.numel() for x in small.parameters()) < sum(x.numel() for x in model.parameters())


@torch.no_grad()
def test_a_decoder_loses_heads_of_both_kinds() -> None:
    torch.manual_seed(4)
    layer = nn.TransformerDecoderLayer(12, H, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 2).eval()
    gone = ["L0.H1", "cross.L1.H2"]
    small = prune(model, gone, reference=[(X, MEMORY)])
    with ablate(model, gone):
        expected = model(X, MEMORY, tgt_mask=CAUSAL)
    torch.testing.assert_close(small(X, MEMORY, tgt_mask=CAUSAL), expected, rtol=0, atol=1e-12)
