"""Sums over rows that Triton adds up by itself are those of the rows that it would write."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from folders import tiny_llama
from headwise.kernels import row_statistics
from headwise.kernels.triton import is_installed
from headwise.layer import MultiHeadAttention
from headwise.watch import _queue, _sums
from oracles import padded
from oracles_layer import AttentionWith
from tiers import tiers

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="no Triton: pip install 'headwise[triton]'"),
    # The interpreter computes in NumPy, which warns of NaN and overflow; a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Batch = dict[str, Any]
# Longer than a block of queries; one of a single token, and one that is all padding.
TEXTS = [[3 + (7 * i) % 9 for i in range(n)] for n in (19, 1, 4)]
NAN = float("nan")
CLASSES = {"odd": {3, 5, 7, 9, 11}, "four": {4}, "none": {12}}
MIXED = ("next", "entropy", "first", "participation", "sink", "self", "lse", "distance", "previous")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each launch has added up; its sums are compared with those of the rows."""
    compute, calls = _sums.sums_of_kernel, []

    def both(q: Tensor, k: Tensor, rule: Any, layout: Any, n_calls: int) -> Any:
        ours = compute(q, k, rule, layout, n_calls)
        assert ours is not None
        rows = row_statistics(q, k, k[..., :0], rule, layout.row_request, backend="triton")
        exact = _sums.sum_rows(rows, layout, n_calls=n_calls)
        torch.testing.assert_close(ours.parts, exact.parts, rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.highest, exact.highest, rtol=0, atol=0, equal_nan=True)
        calls.append(n_calls)
        return ours

    monkeypatch.setattr(_queue, "sums_of_kernel", both)
    if DEVICE == "cpu":  # blocks of 16, so that short texts have several of them
        from headwise.kernels.triton import _launch

        small = _launch.Tiles(rows=16, keys=16, warps=4, stages=1)
        monkeypatch.setattr(_launch, "tiles_for", lambda *_: small)
    return calls


def _batch(side: str, texts: list[list[int]] = TEXTS) -> Batch:
    batch = padded(texts, side)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _nothing_but_padding() -> Batch:
    batch = _batch("left")
    batch["attention_mask"][2] = 0
    return batch


def _packed() -> Batch:
    """Texts in one row, of which several are in a block of queries, and one is in several."""
    rows = [[17, 1, 4], [5, 17]]
    places = [[i for n in row for i in range(n)] for row in rows]
    ids = [[3 + (5 * i) % 7 for i in range(22)] for _ in rows]
    return {"input_ids": torch.tensor(ids), "position_ids": torch.tensor(places)}


class Layers(nn.Module):
    """Two layers of our own."""

    def __init__(self, n_heads: int = 2, softcap: float | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MultiHeadAttention(12, n_heads, 1) for _ in range(2)])
        for layer in self.layers if softcap else ():
            layer.attention = AttentionWith(softcap=softcap)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, causal=True)
        return x


def _mistral() -> nn.Module:
    config = transformers.MistralConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=13, sliding_window=5,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 12}
KINDS: dict[str, Any] = {
    "padding": lambda: (tiny_llama(**SIZES), _batch("left")),
    "padding on the right": lambda: (tiny_llama(**SIZES), _batch("right")),
    "a text of padding": lambda: (tiny_llama(**SIZES), _nothing_but_padding()),
    "half precision": lambda: (tiny_llama(**SIZES).half(), _batch("right")),
    "packed texts": lambda: (_mistral(), _packed()),
    "window": lambda: (_mistral(), {"input_ids": torch.tensor(TEXTS[:1])}),
    "softcap": lambda: (Layers(softcap=3.0), {"x": torch.randn(2, 19, 12)}),
    "nan": lambda: (Layers(), {"x": torch.randn(2, 19, 12).index_fill(1, torch.tensor([8]), NAN)}),
    "short": lambda: (Layers(1), {"x": torch.randn(1, 5, 12)}),
}
REQUESTS = {
    "default": hw.Request(),
    "classes": hw.Request(MIXED, classes=CLASSES, per_text=True),
    "all": hw.Request(("max_logit", "participation", "next"), queries="all", classes=CLASSES),
    "few": hw.Request(("max_logit", "first")),
    "no keys": hw.Request(("max_weight",)),
}
CASES = [(kind, "default") for kind in KINDS]
CASES += [(kind, of) for kind in ("padding", "packed texts") for of in REQUESTS]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "of"), tiers([("short", "few")], CASES))
def test_sums_of_the_kernel_are_those_of_the_rows(
    kind: str, of: str, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = KINDS[kind]()
    model.to(DEVICE)
    batch = {name: x.to(DEVICE) for name, x in batch.items()}
    with hw.observe(model, REQUESTS[of]) as watch:
        model(**batch)  # verified call by call
        monkeypatch.setenv("HEADWISE_TRITON", "1")
        model(**batch)
        assert watch.table().heads
    assert compared == [2]  # of both layers in one launch
