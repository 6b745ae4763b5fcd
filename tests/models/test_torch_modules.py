"""Models outside Hugging Face: torch's own layers, and modules that call its fused function."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.watch import observe
from oracles import means, modules_of

LENGTHS = (7, 3, 5)
X = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(7) >= torch.tensor(LENGTHS)[:, None]  # True = padding


class Plain(nn.Module):
    """Attention as most people write it."""

    def __init__(self, groups: int = 1, **options: Any) -> None:
        super().__init__()
        self.groups, self.how = groups, options
        self.qkv = nn.Linear(12, 12 + 2 * 12 // groups)
        self.proj = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [12, 12 // self.groups, 12 // self.groups]
        q, k, v = (
            part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.groups > 1, **self.how)
        return self.proj(heads.transpose(1, 2).flatten(2))


def _as_ours(plain: Plain) -> MultiHeadAttention:
    ours = MultiHeadAttention(12, 4, 4 // plain.groups, bias=True)
    parts = ("q_proj", "k_proj", "v_proj")
    sizes = [12, 12 // plain.groups, 12 // plain.groups]
    for kind in ("weight", "bias"):
        for name, part in zip(parts, getattr(plain.qkv, kind).split(sizes), strict=True):
            getattr(getattr(ours, name), kind).data.copy_(part)
        getattr(ours.out_proj, kind).data.copy_(getattr(plain.proj, kind))
    return ours


BOOLEAN = torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.7
ADDITIVE = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        ({"is_causal": True}, {"causal": True}),
        ({"attn_mask": BOOLEAN}, {"mask": BOOLEAN}),
        ({"attn_mask": ADDITIVE}, {"mask": ADDITIVE[None]}),
        ({"attn_mask": BOOLEAN, "is_causal": True}, {"mask": BOOLEAN, "causal": True}),
        ({"groups": 2, "is_causal": True}, {"causal": True}),
    ],
    ids=["full", "causal", "boolean", "additive", "boolean and causal", "grouped"],
)
def test_the_fused_function_is_captured(options: dict[str, Any], ours: dict[str, Any]) -> None:
    plain = Plain(**options)
    layer = _as_ours(plain)
    before = modules_of(plain)
    with torch.no_grad(), observe(plain) as watch, observe(layer) as known:
        answer = plain(X)
        layer(X, **ours)
    assert torch.equal(answer, plain(X))
    assert modules_of(plain) == before
    assert [site.kernel for site in watch.sites()] == ["scaled_dot_product_attention"]
    for statistic in watch.table().statistics:
        for column in ("mean", "count", "maximum", "even"):
            actual, expected = (getattr(w.table(), column)(statistic) for w in (watch, known))
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=statistic)


def test_a_model_of_several_plain_layers_has_as_many() -> None:
    model = nn.Sequential(Plain(), nn.GELU(), Plain(is_causal=True))
    with torch.no_grad(), observe(model, layers=[1]) as watch:
        model(X)
    assert [site.name for site in watch.sites()] == ["0", "2"]
    assert {head.layer for head in watch.table().heads} == {1}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_layer_of_torch_is_captured(
    batch_first: bool, need_weights: bool, training: bool
) -> None:
    layer = nn.MultiheadAttention(12, 4, batch_first=batch_first).train(training)
    x = X if batch_first else X.transpose(0, 1)
    options = {"key_padding_mask": PADDING, "attn_mask": torch.ones(7, 7).triu(1).bool()}
    plain, weights = layer(x, x, x, **options, average_attn_weights=False)
    with observe(layer) as watch:
        answer = layer(x, x, x, **options, need_weights=need_weights)[0]
    assert torch.equal(answer, layer(x, x, x, **options, need_weights=need_weights)[0])
    table = watch.table()
    maps = [
        weights[text, :, :length, :length].detach().numpy() for text, length in enumerate(LENGTHS)
    ]
    for statistic, theirs in means(maps).items():
        np.testing.assert_allclose(table.mean(statistic), theirs, rtol=1e-5, err_msg=statistic)
    assert (table.count("lse") == sum(LENGTHS)).all()
    torch.testing.assert_close(answer[:1], plain[:1])


def test_the_layer_of_torch_gives_the_output_of_its_ordinary_path() -> None:
    layer = nn.MultiheadAttention(12, 4, batch_first=True).eval()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        ordinary = layer(X, X, X, key_padding_mask=PADDING)[0]
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad(), observe(layer) as watch:
        assert torch.equal(layer(X, X, X, key_padding_mask=PADDING)[0], ordinary)
    assert torch.backends.mha.get_fastpath_enabled()
    assert "outside its fast path" in watch.sites()[0].kernel


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_encoder_of_torch_is_captured_in_its_ordinary_path(
    nested: bool, training: bool
) -> None:
    block = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=nested).train(training)
    before = modules_of(model)
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        ordinary = model(X, src_key_padding_mask=PADDING)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad(), observe(model) as watch:
        answer = model(X, src_key_padding_mask=PADDING)
    assert torch.equal(answer, ordinary)
    assert torch.backends.mha.get_fastpath_enabled()
    assert modules_of(model) == before
    table = watch.table()
    assert [str(head) for head in table.heads[::4]] == ["L0.H0", "L1.H0"]
    assert (table.count("lse") == sum(LENGTHS)).all()


def test_cross_attention_of_torchs_layer_has_no_neighbors() -> None:
    layer = nn.MultiheadAttention(12, 4, batch_first=True, kdim=5, vdim=6)
    with torch.no_grad(), observe(layer) as watch:
        layer(X, torch.randn(3, 7, 5), torch.randn(3, 7, 6))
    table = watch.table()
    assert str(table.heads[0]) == "cross.L0.H0"
    assert np.isnan(table.mean("previous")).all()
    assert (table.count("first") == 21).all()


def test_keys_that_stand_for_no_token_are_refused() -> None:
    layer = nn.MultiheadAttention(12, 4, batch_first=True, add_zero_attn=True)
    with pytest.raises(UnsupportedError, match="add_zero_attn"), observe(layer):
        layer(X, X, X)
    assert not layer._forward_hooks


def test_attention_of_odd_shape_is_listed() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    with torch.no_grad(), observe(Odd()) as watch:
        watch._model(torch.zeros(1, 2, 3, 4, 5))
    (site,) = watch.sites()
    assert site.watched.startswith("not supported: which axes of its queries (1, 2, 3, 4, 5)")
