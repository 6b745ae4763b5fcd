"""`sites()` lists how each site is captured, and which sites are not and why."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from architectures import CASES
from torch import Tensor, nn

from folders import tiny_bert
from headwise.capture import AttentionCall, capture_calls
from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from oracles import watched

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class FusedSelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class HandwrittenSelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return ((heads @ heads.mT).softmax(-1) @ heads).transpose(1, 2).flatten(2)


class SlicedAttention(nn.Module):
    """Attention that drops a key after the softmax, so that it cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (heads @ heads.mT).softmax(-1)[..., 1:]
        return (weights @ heads[:, :, 1:]).transpose(1, 2).flatten(2)


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.elu(x) @ (F.elu(x).mT @ x)


class OneLayerOfEachKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ours = MultiHeadAttention(8, 2)
        self.torchs = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fused, self.written = FusedSelfAttention(), HandwrittenSelfAttention()
        self.sliced, self.linear = SlicedAttention(), LinearAttention()
        self.unused = nn.ModuleList([MultiHeadAttention(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.torchs(self.ours(x), x, x)[0]
        return self.linear(self.sliced(self.written(self.fused(x))))


def test_sites_lists_every_layer_and_its_implementation() -> None:
    sites = watched(OneLayerOfEachKind(), X).sites()
    rows = zoo.KERNEL
    assert [(s.name, s.watched, s.reason, s.kernel, s.statistics) for s in sites] == [
        ("ours.attention", "a hook on the module", "", "headwise", rows),
        (
            "torchs",
            "a hook on the module",
            "",
            "nn.MultiheadAttention, outside its fast path",
            rows,
        ),
        ("fused", "the function mode", "", "scaled_dot_product_attention", rows),
        (
            "written",
            "the function mode, from a softmax to its values",
            "",
            "softmax",
            f"{rows} of the model's own logits",
        ),
        ("sliced", "", "no product of its softmax with values was found", "", ""),
        (
            "linear",
            "",
            "called, but without a softmax over queries and keys in this thread",
            "",
            "",
        ),
        ("unused.0", "", "not called", "", ""),
    ]
    assert [len(site.heads()) for site in sites] == [2, 2, 2, 2, 0, 0, 0]


def test_a_table_of_a_model_that_cannot_be_watched_is_refused_by_name() -> None:
    model, batch = CASES["LongformerModel"].make()
    watch = watched(model, **batch)
    with pytest.raises(UnsupportedError, match=r"encoder.layer.0.attention.self \(no product of"):
        watch.table()
    with pytest.raises(UnsupportedError, match=r"0 \(called, but without"):
        watched(nn.Sequential(LinearAttention()), X).table()


MAKERS = {
    "layer": lambda: MultiHeadAttention(8, 2), "fused": FusedSelfAttention,
    "bert": lambda: tiny_bert(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
}  # fmt: skip


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_captured_tensors_keep_their_graph_on_request(kind: str, keep_graph: bool) -> None:
    x = X.clone().requires_grad_()
    model = MAKERS[kind]()
    calls: list[AttentionCall] = []
    with capture_calls(model, calls.append, keep_graph=keep_graph):
        model(inputs_embeds=x) if kind == "bert" else model(x)
    (call,) = calls
    assert [t.requires_grad for t in (call.q, call.k, call.v, call.heads)] == [keep_graph] * 4
    if keep_graph:
        (grad,) = torch.autograd.grad(call.q.sum(), x)
        assert grad.abs().sum() > 0
