"""Our layer with adapters, quantized and pruned weights; watching layers of torch."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, prune

from headwise.errors import UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.watch import observe
from oracles import means, modules_of

# Adapters, quantised weights and pruning masks find real `nn.Linear` modules and take effect.


ADAPTED_TEXTS, ADAPTED_TOKENS, D_MODEL = 2, 5, 12


class MinimalModel(nn.Module):
    """The smallest model that accepts an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(D_MODEL, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, causal=True)


def test_lora_learns_on_queries_and_values_and_merges() -> None:
    model, x = MinimalModel(), torch.randn(ADAPTED_TEXTS, ADAPTED_TOKENS, D_MODEL)
    before = model(x)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(adapted(x), before)  # an adapter begins as the identity
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(x).square().mean().backward()
        optimizer.step()
    after = adapted(x)
    assert not torch.allclose(after, before)
    learned = {
        name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in learned} == {"q_proj", "v_proj"}
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), after)
    for name in ("attention.k_proj.weight", "attention.out_proj.weight"):
        assert torch.equal(merged.state_dict()[name], kept[name])


def test_parametrised_and_pruned_projections_are_used() -> None:
    layer, x = MultiHeadAttention(D_MODEL, 4), torch.randn(ADAPTED_TEXTS, ADAPTED_TOKENS, D_MODEL)
    prune.l1_unstructured(layer.q_proj, "weight", amount=0.5)
    with torch.no_grad():
        pruned = layer(x)
        prune.remove(layer.q_proj, "weight")
        assert torch.equal(layer(x), pruned)
    assert (layer.q_proj.weight == 0).sum() == D_MODEL * D_MODEL // 2
    parametrize.register_parametrization(layer.v_proj, "weight", nn.Tanh(), unsafe=True)
    bounded = layer(x)
    parametrize.remove_parametrizations(layer.v_proj, "weight")
    torch.testing.assert_close(layer(x), bounded)


class Int8Linear(nn.Module):
    """A projection that keeps whole numbers and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).T


def test_quantised_projections_are_used() -> None:
    layer, x = MultiHeadAttention(D_MODEL, 4), torch.randn(ADAPTED_TEXTS, ADAPTED_TOKENS, D_MODEL)
    before = layer(x)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(layer, name, Int8Linear(layer.get_submodule(name)))
    assert 0 < (layer(x) - before).abs().max() < 0.02


# Models outside Hugging Face: torch's own layers, and modules that call its fused function.


LENGTHS = (7, 3, 5)
X = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(7) >= torch.tensor(LENGTHS)[:, None]  # True = padding


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
