"""`scaled_dot_product_attention` on other numbers of axes than four."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watch import Watch

HEADS, WIDTH, T, WINDOWS = 4, 3, 5, 2
MASK = torch.ones(T, T, dtype=torch.bool).tril()


class AxesAttention(nn.Module):
    """The same attention on queries of 2 to 5 axes; `n_heads` is what it declares."""

    def __init__(self, axes: str, n_heads: int = HEADS) -> None:
        super().__init__()
        self.axes, self.n_heads = axes, n_heads
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.axes)(*self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2))

    def four(self, *qkv: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), attn_mask=MASK)
        return heads.transpose(1, 2).flatten(2)

    def three(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in qkv)
        mask = MASK.expand(len(q), T, T)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return heads.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)

    def two(self, *qkv: Tensor) -> Tensor:
        texts = [
            [
                F.scaled_dot_product_attention(*(x[row, :, h] for x in qkv), attn_mask=MASK)
                for h in range(HEADS)
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


def _watched(model: nn.Module, x: Tensor) -> Watch:
    with torch.no_grad():
        expected = model(x)
        with hw.observe(model) as watch:
            for _ in range(2):
                assert torch.equal(model(x), expected)
    return watch


def _alike(axes: str) -> tuple[AxesAttention, AxesAttention]:
    torch.manual_seed(0)
    model, usual = AxesAttention(axes), AxesAttention("four")
    usual.load_state_dict(model.state_dict())
    return model, usual


@pytest.mark.parametrize("axes", ["three", "grouped", "windows"])
def test_heads_on_any_number_of_axes_are_those_on_four(axes: str) -> None:
    model, usual = _alike(axes)
    x = torch.randn(3, WINDOWS * T if axes == "windows" else T, HEADS * WIDTH)
    table = _watched(model, x).table()
    # Each window is a text.
    known = _watched(usual, x.view(-1, T, HEADS * WIDTH)).table()
    assert table.heads == known.heads
    for name in known.statistics:
        np.testing.assert_array_equal(table.count(name), known.count(name), err_msg=name)
        np.testing.assert_allclose(table.mean(name), known.mean(name), rtol=1e-6, err_msg=name)


def test_queries_of_two_axes_are_a_head_of_a_text() -> None:
    model, usual = _alike("two")
    x = torch.randn(1, T, HEADS * WIDTH)
    table, known = _watched(model, x).table(), _watched(usual, x).table()
    for name in known.statistics:
        mean = known.mean(name).mean()  # the calls on parts of the same queries are one head
        np.testing.assert_allclose(table.mean(name), [mean], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("n_heads", [1, 3])
def test_queries_of_five_axes_without_a_number_of_heads_are_listed(n_heads: int) -> None:
    model = nn.Sequential(AxesAttention("four"), AxesAttention("grouped", n_heads))
    watch = _watched(model, torch.randn(3, T, HEADS * WIDTH))
    why = r"not supported: which axes of its queries (3, 2, 2, 5, 3) are heads is unknown"
    assert {site.name: site.watched for site in watch.sites()}["1"] == why
    assert [str(head) for head in watch.table().heads] == [f"L0.H{head}" for head in range(HEADS)]
