"""Whose each index of each weight is: derived, and beside it what the code of families says."""

import pytest
import torch
import zoo
from torch import Tensor

from headwise import MultiHeadAttention
from headwise.models import OwnershipMap, example_input, find_attentions, find_ownership

_SEPARATE = {
    "query.weight": "q0 q1 q2 q3",
    "key.weight": "k0 k1 k2 k3",
    "value.bias": "k0 k1 k2 k3",
}
_GROUPED = {"q_proj.weight": "q0 q1 q2 q3", "k_proj.weight": "k0 k1", "v_proj.weight": "k0 k1"}

# How heads lie along the outputs of each projection, written down by hand from their code:
# q is a query head, k its keys and values, - nobody's.
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
    # Attention that is written out shows no keys: they count as those of the head that reads them.
    "GPTJForCausalLM": {f"{role}_proj.weight": "q0 q1 q2 q3" for role in "qkv"},
    "BloomForCausalLM": {"query_key_value.bias": "q0 q1 q2 q3"},
    "MptForCausalLM": {"Wqkv.weight": "q0 q1 q2 q3 q0 q1 q2 q3 q0 q1 q2 q3"},
}


def _runs(share: OwnershipMap) -> str:
    """The owners in order, each run of the same one told once."""
    found: list[str] = []
    for head, kv_head in zip(share.heads.tolist(), share.kv_heads.tolist(), strict=True):
        owner = f"q{head}" if head >= 0 else f"k{kv_head}" if kv_head >= 0 else "-"
        if not found or found[-1] != owner:
            found.append(owner)
    return " ".join(found)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_they_are_what_the_code_says(name: str) -> None:
    model = zoo.make(name)
    attentions = find_attentions(model)
    before = {name: x.requires_grad for name, x in model.named_parameters()}
    shares = find_ownership(model, attentions, example_input(model))
    for attention in attentions:
        found = {share.name: share for share in shares[attention]}
        assert all(share.name.startswith(attention.around) for share in shares[attention])
        told = {one.removeprefix(f"{attention.around}."): _runs(x) for one, x in found.items()}
        told = {one.removeprefix("self."): runs for one, runs in told.items()}
        for weight, runs in FAMILIES[name].items():
            assert told[weight] == runs
        assert _runs(found[f"{attention.output.name}.weight"]) == "q0 q1 q2 q3"
    assert {name: x.requires_grad for name, x in model.named_parameters()} == before
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("name", ["Bert", "Falcon", "GPT2", "GPTNeoX", "GptOss", "Phi3"])
@torch.no_grad()
def test_what_is_changed_of_one_head_changes_that_head_alone(name: str) -> None:
    model = zoo.make(name)
    batch = example_input(model)
    first = find_attentions(model)[0]
    H, D = first.site.n_heads, first.output.per_head.shape[1]
    shares = find_ownership(model, [first], batch)[first]
    given: list[Tensor] = []
    first.output.module.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(**batch)
    for head in range(H):
        for share in shares[:-1]:
            weight = dict(model.named_parameters())[share.name]
            kept = weight.clone()
            weight.index_fill_(share.axis, (share.heads == head).nonzero().flatten(), 0.37)
            model(**batch)
            weight.copy_(kept)
            changed = (given[-1] != given[0]).unflatten(-1, (H, D)).any(-1).flatten(0, -2).any(0)
            others = [other for other in range(H) if other != head]
            assert not changed[others].any(), share.name


def test_those_of_our_layer() -> None:
    layer = MultiHeadAttention(12, 4, 2, gate=True, qk_norm=True)
    [attention] = find_attentions(layer)
    shares = find_ownership(layer, [attention], example_input(layer))[attention]
    assert {share.name: _runs(share) for share in shares} == {
        "q_proj.weight": "q0 q1 q2 q3",
        "k_proj.weight": "k0 k1",
        "v_proj.weight": "k0 k1",
        "gate_proj.weight": "q0 q1 q2 q3",
        "out_proj.weight": "q0 q1 q2 q3",
    }
