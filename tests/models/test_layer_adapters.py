"""Adapters, quantised weights and pruning masks find real `nn.Linear` modules and take effect."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, prune

from headwise.layer import MultiHeadAttention

B, T, D_MODEL = 2, 5, 12


class MinimalModel(nn.Module):
    """The smallest model that accepts an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(D_MODEL, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, causal=True)


def test_lora_learns_on_queries_and_values_and_merges() -> None:
    model, x = MinimalModel(), torch.randn(B, T, D_MODEL)
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
    layer, x = MultiHeadAttention(D_MODEL, 4), torch.randn(B, T, D_MODEL)
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
    layer, x = MultiHeadAttention(D_MODEL, 4), torch.randn(B, T, D_MODEL)
    before = layer(x)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(layer, name, Int8Linear(layer.get_submodule(name)))
    assert 0 < (layer(x) - before).abs().max() < 0.02
