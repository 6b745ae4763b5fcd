"""Grouping undoes the maps that queries and outputs can absorb, and changes nothing else."""

import copy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from double import Double, doubled
from headwise import group_heads
from headwise.models import fingerprint
from headwise.ownership import find_attentions
from headwise.surgery import GroupedLayer

HEADS, D = 8, 8
IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
_SIZES = {
    "hidden_size": HEADS * D, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 32, "vocab_size": 23, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """An architecture: how its positions rotate keys.

    Attributes:
        config: Further fields of its configuration.
        rotated: The number of leading features of a key that positions rotate.
        halves: Whether feature i is paired with feature i + rotated / 2, or with the next one.
        fixed: Whether no map of keys leaves the attention unchanged.
        count_name: The name of the number of kv heads in its configuration.
    """

    config: dict[str, Any]
    rotated: int = D
    halves: bool = True
    fixed: bool = False
    count_name: str = "num_key_value_heads"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        half = self.rotated // 2
        return [(i, i + half) if self.halves else (2 * i, 2 * i + 1) for i in range(half)]


KINDS = {
    "Llama": Kind({}),
    "Qwen2": Kind({}),  # biases of queries, keys and values
    "Cohere": Kind({"use_qk_norm": False}, halves=False),
    "Phi": Kind({"partial_rotary_factor": 0.5}, rotated=4),  # biases everywhere
    "StableLm": Kind({"partial_rotary_factor": 0.25, "use_qkv_bias": True}, rotated=2),
    "Glm": Kind(
        {"partial_rotary_factor": 0.5, "head_dim": D, "attention_bias": True},
        rotated=4,
        halves=False,
    ),
    "SmolLM3": Kind({"no_rope_layers": [0, 0]}, rotated=0),  # no positions at all
    "Qwen3": Kind({"head_dim": D}, fixed=True),  # norms of queries and keys
    "Gemma2": Kind({"head_dim": D, "query_pre_attn_scalar": D}),
    "GptOss": Kind(
        {"head_dim": D, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"layer_types": ["full_attention"] * 2}
    ),  # a sink for each head
    "Phi3": Kind({}),  # queries, keys and values in one layer
    "Falcon": Kind(
        {"new_decoder_architecture": True}, count_name="num_kv_heads"
    ),  # per group: queries, key, value
}


def _make(name: str, n_kv_heads: int) -> nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        **_SIZES | KINDS[name].config | {KINDS[name].count_name: n_kv_heads}
    )
    model = doubled(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))  # biases of zeros prove nothing
    return model


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    with Double():
        return model(input_ids=IDS, use_cache=False).logits


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def _heads(attention: nn.Module, n_kv_heads: int) -> dict[str, Tensor]:
    """Views of its weights, and of its biases, head by head."""
    count = {"q": HEADS, "k": n_kv_heads, "v": n_kv_heads}
    heads = {}
    if hasattr(attention, "query_key_value"):
        weight = attention.query_key_value.weight
        groups = weight.view(n_kv_heads, -1, D, weight.shape[1])
        heads = {"q": groups[:, :-2].flatten(0, 1), "k": groups[:, -2], "v": groups[:, -1]}
    elif hasattr(attention, "qkv_proj"):
        parts = attention.qkv_proj.weight.split([n * D for n in count.values()])
        heads |= {part: x.view(-1, D, x.shape[1]) for part, x in zip(count, parts, strict=True)}
    for part in count if not heads else ():
        layer = attention.get_submodule(f"{part}_proj")
        heads[part] = layer.weight.view(-1, D, layer.in_features)
        if layer.bias is not None:
            heads[f"{part}.bias"] = layer.bias.view(-1, D, 1)
    out = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
    heads["out"] = out.weight.T.view(HEADS, D, -1)
    if hasattr(attention, "sinks"):
        heads["sinks"] = attention.sinks.view(HEADS, 1, 1)
    return heads


def _random_rotation(kind: Kind) -> Tensor:
    """A random map of keys that leaves the attention unchanged."""
    if kind.fixed:
        return torch.eye(D)
    n_free = D - kind.rotated
    matrix = torch.zeros(D, D)
    matrix[kind.rotated :, kind.rotated :] = torch.linalg.qr(torch.randn(n_free, n_free))[0]
    for i, j in kind.pairs:
        factor = torch.polar(torch.rand(()) + 0.5, 6 * torch.rand(()))
        matrix[i, i] = matrix[j, j] = factor.real
        matrix[i, j], matrix[j, i] = -factor.imag, factor.imag
    return matrix


@torch.no_grad()
def _plant(name: str, small: nn.Module, n_kv_heads: int) -> nn.Module:
    """The same model with more kv heads: copies under random maps, in random order."""
    wide = _make(name, n_kv_heads)
    shapes = {key: x.shape for key, x in wide.named_parameters()}
    same = {key: x for key, x in small.state_dict().items() if shapes.get(key) == x.shape}
    wide.load_state_dict(same, strict=False)
    n_old = getattr(small.config, KINDS[name].count_name)
    for attention, wide_attention in zip(_attentions(small), _attentions(wide), strict=True):
        old, new = _heads(attention, n_old), _heads(wide_attention, n_kv_heads)
        old = {key: x.clone() for key, x in old.items()}
        # The queries of each old group are split over new groups, in random order.
        groups = [
            group[torch.randperm(len(group))] for group in torch.arange(HEADS).view(n_old, -1)
        ]
        dealt = [part for group in groups for part in group.split(HEADS // n_kv_heads)]
        dealt = [dealt[index] for index in torch.randperm(n_kv_heads)]
        for kv, queries in enumerate(dealt):
            source = int(queries[0]) * n_old // HEADS
            rotation = _random_rotation(KINDS[name]).double()
            mix = torch.linalg.qr(torch.randn(D, D))[0].double() * (torch.rand(D, 1) + 0.5)
            new_queries = slice(kv * len(queries), (kv + 1) * len(queries))
            maps = {"k": rotation, "v": mix, "q": rotation.inverse().T, "out": mix.inverse().T}
            for key in new:
                part = key.split(".")[0]
                start, end = (source, kv) if part in "kv" else (queries, new_queries)
                new[key][end] = maps.get(part, torch.eye(1).double()) @ old[key][start]
    return wide


# Where queries alternate with keys and values, only one head of each group is a view.
PLANTED = [
    pytest.param(name, n, marks=pytest.mark.full if n == 8 and name != "Falcon" else ())
    for name in KINDS
    for n in (4, 8)
    if (name, n) != ("Falcon", 4)
]


@pytest.mark.parametrize(("name", "n_kv_heads"), PLANTED)
def test_copies_under_random_maps_are_recovered(name: str, n_kv_heads: int) -> None:
    target, count_name = _make(name, 2), KINDS[name].count_name
    wide = _plant(name, target, n_kv_heads)
    expected, before = _logits(wide), fingerprint(wide)
    torch.testing.assert_close(expected, _logits(target), rtol=0, atol=1e-9)
    layers: list[GroupedLayer] = []
    small = group_heads(wide, 2, on_layer=layers.append)
    torch.testing.assert_close(_logits(small), expected, rtol=0, atol=1e-9)
    assert len(layers) == 2
    assert all(abs(x) < 1e-9 for layer in layers for x in (layer.keys_lost, layer.values_lost))
    assert fingerprint(wide) == before
    assert (getattr(wide.config, count_name), getattr(small.config, count_name)) == (n_kv_heads, 2)
    assert {key: x.shape for key, x in small.named_parameters()} == {
        key: x.shape for key, x in target.named_parameters()
    }


def test_each_layer_is_reported() -> None:
    layers: list[GroupedLayer] = []
    group_heads(_plant("Phi", _make("Phi", 2), 8), 2, on_layer=layers.append)
    assert [x.name for x in layers] == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert {layer.keys for layer in layers} == {"4 features mixed, 4 features rotated in pairs"}
    assert {layer.values for layer in layers} == {"8 features mixed"}
    assert sorted(head for group in layers[0].groups for head in group) == [*range(8)]
    group_heads(_make("Qwen3", 8), 2, on_layer=layers.append)
    assert {layer.keys for layer in layers[2:]} == {"averaged"}
    assert {layer.values for layer in layers[2:]} == {"8 features mixed"}
    assert all(0 < x.keys_lost < 1 and 0 < x.values_lost < 1 for x in layers[2:])


def test_clipped_features_are_only_averaged() -> None:
    model = zoo.make("Olmo")
    model.config.clip_qkv = 1e3  # no value of this model is that large
    layers: list[GroupedLayer] = []
    group_heads(model, 1, on_layer=layers.append)
    assert {(layer.keys, layer.values) for layer in layers} == {("averaged", "averaged")}


@pytest.mark.parametrize("reference", [False, True])
def test_fitted_heads_lose_less_than_their_mean(reference: bool) -> None:
    model = _make("Llama", 8)
    options = {"reference": [{"input_ids": IDS}]} if reference else {}
    expected = _logits(model)
    fit = _logits(group_heads(model, 4, **options)) - expected
    averaged = copy.deepcopy(model)
    with torch.no_grad():  # neighbors share their mean, as Ainslie et al. 2023 begin
        for attention in _attentions(averaged):
            for projection in (attention.k_proj, attention.v_proj):
                rows = projection.weight.unflatten(0, (4, 2, -1))
                rows.copy_(rows.mean(1, keepdim=True).expand_as(rows))
    assert fit.norm() < 0.9 * (_logits(averaged) - expected).norm()


def test_padding_does_not_count_in_the_reference() -> None:
    model = _make("Llama", 8)
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    padded = {name: nn.functional.pad(x, (0, 3)) for name, x in batch.items()}
    small, small_padded = (group_heads(model, 2, reference=[x]) for x in (batch, padded))
    torch.testing.assert_close(_logits(small), _logits(small_padded), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_shrinks_and_generation_is_unchanged(cache: str) -> None:
    target = _make("Llama", 2)
    wide = _plant("Llama", target, 8)
    small = group_heads(wide, 2)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache}
    generated = [model.generate(input_ids=IDS[:1], **options) for model in (wide, small)]
    assert torch.equal(*generated)
    for model, heads in ((wide, 8), (small, 2)):
        cached = model(input_ids=IDS, use_cache=True).cache
        assert {layer.keys.shape[1] for layer in cached.layers} == {heads}


STOCK = """
import sys
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = load_file(sys.argv[2])["ids"]
save_file({"logits": model(input_ids=ids).logits.detach()}, sys.argv[2])
assert not [name for name in sys.modules if name.startswith("headwise")]
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
@torch.no_grad()
def test_stock_transformers_loads_it_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    small = group_heads(_make(name, 8).float(), 2)
    small.save_pretrained(tmp_path / "small")
    file = tmp_path / "ids.safetensors"
    save_file({"ids": IDS}, file)
    subprocess.run([sys.executable, "-c", STOCK, str(tmp_path / "small"), str(file)], check=True)
    assert torch.equal(load_file(file)["logits"], small(input_ids=IDS).logits)


def test_frozen_weights_and_the_mode_are_kept() -> None:
    model = _make("Qwen2", 8).train()
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    small = group_heads(model, 2)
    flags = {key: x.requires_grad for key, x in small.named_parameters()}
    assert flags == {key: x.requires_grad for key, x in model.named_parameters()}
    assert all(module.training for module in small.modules())


# Every architecture with kv heads in its configuration, except those refused in tests/errors, and
# StableLm, where positions would rotate one and a half features of the tiny heads.
GROUPED = [
    pytest.param(name, marks=pytest.mark.full)
    for name in sorted(zoo.TEXT)
    if name in zoo._DECODERS and name not in ("Cohere", "Olmo2", "StableLm")
] + ["Gemma3", "Falcon"]


@pytest.mark.parametrize("name", GROUPED)
def test_every_architecture_can_be_grouped(name: str) -> None:
    model = zoo.make(name)
    small = group_heads(model, 1)
    sites = [attention.site for attention in find_attentions(small)]
    weights = [sum(x.numel() for x in m.parameters()) for m in (model, small)]
    assert weights[1] < weights[0]
    assert len(sites) == 2
