"""Every saved model can be loaded: the size limit is never too strict."""

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

import headwise as hw
from folders import tiny_llama, word_tokenizer
from headwise import MultiHeadAttention
from headwise.checkpoints import load
from headwise.models import fingerprint
from headwise.ownership import OwnershipMap, example_input, find_attentions, find_ownership
from oracles import first_tensor

_FEW = ("Albert", "Gemma2", "GPT2", "GptOss", "Llama", "Qwen3Moe")


@pytest.mark.parametrize("name", zoo.each(_FEW))
def test_a_saved_model_can_be_loaded(name: str, tmp_path: Path) -> None:
    model: Any = zoo.make(name)
    model.save_pretrained(tmp_path)
    opened = load(tmp_path)
    weights = dict(opened.named_parameters())
    assert type(opened) is type(model)
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(x, weights[name]) for name, x in model.named_parameters())


# A copy of a model, made or saved while it is watched or ablated, is a plain model.


INSIDE: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "observe": hw.observe,
    "ablate": lambda model: hw.ablate(model, "L0.H1"),
}


def _torch() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "Bert": (lambda: zoo.make("Bert"), torch.tensor([[1, 2, 3, 4]])),
    "ours": (lambda: hw.MultiHeadAttention(12, 3), torch.randn(1, 4, 12)),
    "torch": (_torch, torch.randn(1, 4, 12)),
}


def _saved_and_read(model: nn.Module) -> nn.Module:
    held = io.BytesIO()
    torch.save(model, held)
    return torch.load(io.BytesIO(held.getvalue()), weights_only=False)


def _answer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return first_tensor(model(x))


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("copied", [copy.deepcopy, _saved_and_read])
def test_a_copy_is_neither_watched_nor_ablated(
    name: str, inside: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    expected = _answer(model, x)
    with INSIDE[inside](model) as block:
        within = _answer(model, x)
        twin = copied(model)
        torch.testing.assert_close(_answer(twin, x), expected)
        if inside == "observe":
            assert (block.table().count("entropy") == x.shape[1]).all()
    torch.testing.assert_close(_answer(twin, x), expected)
    assert torch.equal(_answer(model, x), expected)
    assert torch.allclose(within, expected) == (inside == "observe")


# Models that Accelerate spreads over devices: observed and scored as whole ones.


accelerate = pytest.importorskip("accelerate")
IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 2, 1, 8]])


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_an_offloaded_model_is_observed_and_scored(where: str, tmp_path: Path) -> None:
    whole, model = tiny_llama(), tiny_llama()
    # "cpu" stands for a device of its own here: weights are loaded for each call of a module.
    if where == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())
    assert fingerprint(model) == fingerprint(whole)
    tables = []
    for each in (whole, model):
        with hw.observe(each) as watch, torch.no_grad():
            each(input_ids=IDS)
        tables.append(watch.table())
    known, table = tables
    assert (table.heads, table.model) == (known.heads, known.model)
    for name in known.statistics:
        np.testing.assert_array_equal(table.count(name), known.count(name))
        np.testing.assert_array_equal(table.mean(name), known.mean(name))
    batches = [{"input_ids": IDS}]
    for method in ("half-gate", "ablation"):
        expected = hw.importance(whole, batches, method)
        scores = hw.importance(model, batches, method)
        np.testing.assert_allclose(scores.per_text, expected.per_text, rtol=1e-6, atol=1e-9)
        assert scores.model == expected.model
    texts = {"text": ["5 9 7 3 11", "4 6 2 1 8", "1 2"]}
    tokenizer = word_tokenizer(map(str, range(13)))
    tables = [
        hw.HeadTable.sum([hw.BatchObserver(each, tokenizer=tokenizer)(texts)])
        for each in (whole, model)
    ]
    np.testing.assert_array_equal(tables[1].mean("entropy"), tables[0].mean("entropy"))
    assert tables[1].model == tables[0].model


# Ownership maps that gradients find, against those that the code of each family implies.


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
