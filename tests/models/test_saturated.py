"""Heads with huge logits: only keys that the mask hides count as hidden."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.watch import Request, observe

B, T, HEADS, WIDTH = 2, 9, 4, 5
LENGTHS = (9, 6)
LOWEST = torch.finfo(torch.float32).min
# A logit this far below another has no weight in any precision.
NONE = -104.0


class MaskedAttention(nn.Module):
    """Attention implemented by hand, masked in one of the usual ways."""

    num_heads = HEADS

    def __init__(self, way: str, constant: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(20, 60)
        self.way, self.constant, self.scale = way, constant, 1.0
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
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
        bias = torch.linspace(-8, 8, HEADS * T * T).view(1, HEADS, T, T).to(scores.dtype)
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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("constant", [LOWEST, -1e9, -65500.0, -1e4])
@pytest.mark.parametrize("way", WAYS)
def test_keys_of_zero_weight_count_as_visible_unless_masked(
    way: str, constant: float, side: str
) -> None:
    for scale in (1.0, 1e3, 1e4, 1e6):
        _check(MaskedModel(way, constant), side, [scale], torch.float32, 1e-5)


@pytest.mark.parametrize("way", ["fill", "add"])
def test_a_watch_survives_an_entropy_collapse(way: str) -> None:
    _check(MaskedModel(way, -1e4), "right", [1.0, 30.0, 1e3, 1e5, 1e6], torch.float32, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["fill", "add", "multiply", "with_bias"])
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
