"""Ownership maps that gradients find, against those that the code of each family implies."""

import pytest
import torch
import zoo
from torch import Tensor

from headwise import MultiHeadAttention
from headwise.models.ownership import (
    OwnershipMap,
    example_input,
    find_attentions,
    find_ownership,
)

_SEPARATE = {
    "query.weight": "q0 q1 q2 q3",
    "key.weight": "k0 k1 k2 k3",
    "value.bias": "k0 k1 k2 k3",
}
_GROUPED = {"q_proj.weight": "q0 q1 q2 q3", "k_proj.weight": "k0 k1", "v_proj.weight": "k0 k1"}

# How heads lie along the outputs of each projection, written down by hand from their code:
# q is a query head, k a key/value head, - no head.
FAMILIES = {
    "Bert": _SEPARATE,
    "Llama": _GROUPED,
    "Qwen2": _GROUPED | {"k_proj.bias": "k0 k1"},
    "Cohere": _GROUPED | {"q_norm.weight": "q0 q1 q2 q3", "k_norm.weight": "k0 k1"},
    "GptOss": _GROUPED | {"sinks": "q0 q1 q2 q3"},
    "GPT2": {"c_attn.weight": "q0 q1 q2 q3 k0 k1 k2 k3 k0 k1 k2 k3"},
    "ModernBert": {"Wqkv.weight": "q0 q1 q2 q3 k0 k1 k2 k3 k0 k1 k2 k3"},
    "Phi3": {"qkv_proj.weight": "q0 q1 q2 q3 k0 k1 k0 k1"},
    "GPTNeoX": {"query_key_value.weight": "q0 k0 q1 k1 q2 k2 q3 k3"},
    "Falcon": {"query_key_value.weight": "q0 q1 k0 q2 q3 k1"},
    "FalconMultiQuery": {"query_key_value.weight": "q0 q1 q2 q3 -"},
    "DeepseekV3": {"q_b_proj.weight": "q0 q1 q2 q3", "kv_b_proj.weight": "k0 k1 k2 k3"},
    # Keys of hand-written attention are not captured: the query heads own them.
    "GPTNeoForCausalLM": {f"{role}_proj.weight": "q0 q1 q2 q3" for role in "qkv"},
    "BloomForCausalLM": {"query_key_value.bias": "q0 q1 q2 q3"},
    "MptForCausalLM": {"Wqkv.weight": "q0 q1 q2 q3 q0 q1 q2 q3 q0 q1 q2 q3"},
}


def _runs(owners: OwnershipMap) -> str:
    """The owners in order, with one entry per run of equal ones."""
    runs: list[str] = []
    for head, kv_head in zip(owners.heads.tolist(), owners.kv_heads.tolist(), strict=True):
        owner = f"q{head}" if head >= 0 else f"k{kv_head}" if kv_head >= 0 else "-"
        if not runs or runs[-1] != owner:
            runs.append(owner)
    return " ".join(runs)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ownership_maps_agree_with_the_code(name: str) -> None:
    model = zoo.make(name)
    attentions = find_attentions(model)
    before = {name: x.requires_grad for name, x in model.named_parameters()}
    maps = find_ownership(model, attentions, example_input(model))
    for attention in attentions:
        by_name = {owners.name: owners for owners in maps[attention]}
        assert all(owners.name.startswith(attention.around) for owners in maps[attention])
        prefix = f"{attention.around}."
        local = {name.removeprefix(prefix): _runs(x) for name, x in by_name.items()}
        local = {name.removeprefix("self."): runs for name, runs in local.items()}
        for weight, runs in FAMILIES[name].items():
            assert local[weight] == runs
        assert _runs(by_name[f"{attention.output.name}.weight"]) == "q0 q1 q2 q3"
    assert {name: x.requires_grad for name, x in model.named_parameters()} == before
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("name", ["Bert", "Falcon", "GPT2", "GPTNeoX", "GptOss", "Phi3"])
@torch.no_grad()
def test_changing_the_weights_of_a_head_changes_that_head_alone(name: str) -> None:
    model = zoo.make(name)
    batch = example_input(model)
    first = find_attentions(model)[0]
    H, D = first.site.n_heads, first.output.per_head.shape[1]
    maps = find_ownership(model, [first], batch)[first]
    outputs: list[Tensor] = []
    first.output.module.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    model(**batch)
    for head in range(H):
        for owners in maps[:-1]:
            weight = dict(model.named_parameters())[owners.name]
            kept = weight.clone()
            weight.index_fill_(owners.axis, (owners.heads == head).nonzero().flatten(), 0.37)
            model(**batch)
            weight.copy_(kept)
            changed = (
                (outputs[-1] != outputs[0]).unflatten(-1, (H, D)).any(-1).flatten(0, -2).any(0)
            )
            unchanged = [index for index in range(H) if index != head]
            assert not changed[unchanged].any(), owners.name


def test_the_maps_of_our_layer() -> None:
    layer = MultiHeadAttention(12, 4, 2, gate=True, qk_norm=True)
    [attention] = find_attentions(layer)
    maps = find_ownership(layer, [attention], example_input(layer))[attention]
    assert {owners.name: _runs(owners) for owners in maps} == {
        "q_proj.weight": "q0 q1 q2 q3",
        "k_proj.weight": "k0 k1",
        "v_proj.weight": "k0 k1",
        "gate_proj.weight": "q0 q1 q2 q3",
        "out_proj.weight": "q0 q1 q2 q3",
    }
