"""Heads that share keys and values: what can be absorbed is found again, and nothing else moves."""

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
from headwise.models import find_attentions, fingerprint
from headwise.surgery import GroupedLayer
from oracles import modules_of

HEADS, D = 8, 8
IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
_SIZES = {
    "hidden_size": HEADS * D, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 32, "vocab_size": 23, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """An architecture: how its positions turn keys.

    Attributes:
        more: What its configuration says besides.
        turned: How many leading features of a key positions turn.
        halves: Whether feature i is paired with that half of them further on, or with the next.
        still: Whether keys have to stay as they are.
        called: What its configuration calls the number of kv heads.
    """

    more: dict[str, Any]
    turned: int = D
    halves: bool = True
    still: bool = False
    called: str = "num_key_value_heads"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        half = self.turned // 2
        return [(i, i + half) if self.halves else (2 * i, 2 * i + 1) for i in range(half)]


KINDS = {
    "Llama": Kind({}),
    "Qwen2": Kind({}),  # biases of queries, keys and values
    "Cohere": Kind({"use_qk_norm": False}, halves=False),
    "Phi": Kind({"partial_rotary_factor": 0.5}, turned=4),  # biases everywhere
    "StableLm": Kind({"partial_rotary_factor": 0.25, "use_qkv_bias": True}, turned=2),
    "Glm": Kind(
        {"partial_rotary_factor": 0.5, "head_dim": D, "attention_bias": True},
        turned=4,
        halves=False,
    ),
    "SmolLM3": Kind({"no_rope_layers": [0, 0]}, turned=0),  # no positions at all
    "Qwen3": Kind({"head_dim": D}, still=True),  # norms of queries and keys
    "Gemma2": Kind({"head_dim": D, "query_pre_attn_scalar": D}),
    "GptOss": Kind(
        {"head_dim": D, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"layer_types": ["full_attention"] * 2}
    ),  # a sink for each head
    "Phi3": Kind({}),  # queries, keys and values in one layer
    "Falcon": Kind({"new_decoder_architecture": True}, called="num_kv_heads"),  # they take turns
}


def _make(name: str, n_kv_heads: int) -> nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        **_SIZES | KINDS[name].more | {KINDS[name].called: n_kv_heads}
    )
    model = doubled(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))  # biases of zeros prove nothing
    return model


@torch.no_grad()
def _answer(model: nn.Module) -> Tensor:
    with Double():
        return model(input_ids=IDS, use_cache=False).logits


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if type(one).__name__.endswith("Attention")]


def _heads(attention: nn.Module, n_kv_heads: int) -> dict[str, Tensor]:
    """Views of its weights, and of its biases, head by head."""
    count = {"q": HEADS, "k": n_kv_heads, "v": n_kv_heads}
    found = {}
    if hasattr(attention, "query_key_value"):
        weight = attention.query_key_value.weight
        turns = weight.view(n_kv_heads, -1, D, weight.shape[1])
        found = {"q": turns[:, :-2].flatten(0, 1), "k": turns[:, -2], "v": turns[:, -1]}
    elif hasattr(attention, "qkv_proj"):
        parts = attention.qkv_proj.weight.split([n * D for n in count.values()])
        found |= {part: x.view(-1, D, x.shape[1]) for part, x in zip(count, parts, strict=True)}
    for part in count if not found else ():
        layer = attention.get_submodule(f"{part}_proj")
        found[part] = layer.weight.view(-1, D, layer.in_features)
        if layer.bias is not None:
            found[f"{part}.bias"] = layer.bias.view(-1, D, 1)
    out = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
    found["out"] = out.weight.T.view(HEADS, D, -1)
    if hasattr(attention, "sinks"):
        found["sinks"] = attention.sinks.view(HEADS, 1, 1)
    return found


def _turning(kind: Kind) -> Tensor:
    """A matrix that keys may be multiplied with."""
    if kind.still:
        return torch.eye(D)
    left = D - kind.turned
    matrix = torch.zeros(D, D)
    matrix[kind.turned :, kind.turned :] = torch.linalg.qr(torch.randn(left, left))[0]
    for one, two in kind.pairs:
        turn = torch.polar(torch.rand(()) + 0.5, 6 * torch.rand(()))
        matrix[one, one] = matrix[two, two] = turn.real
        matrix[one, two], matrix[two, one] = -turn.imag, turn.imag
    return matrix


@torch.no_grad()
def _plant(name: str, small: nn.Module, n_kv_heads: int) -> nn.Module:
    """The same model with more kv heads: copies, each turned in its own way, all shuffled."""
    wide = _make(name, n_kv_heads)
    shapes = {key: x.shape for key, x in wide.named_parameters()}
    same = {key: x for key, x in small.state_dict().items() if shapes.get(key) == x.shape}
    wide.load_state_dict(same, strict=False)
    n_old = getattr(small.config, KINDS[name].called)
    for one, two in zip(_attentions(small), _attentions(wide), strict=True):
        old, new = _heads(one, n_old), _heads(two, n_kv_heads)
        old = {key: x.clone() for key, x in old.items()}
        # Of each old group the queries are dealt out to new ones, which are shuffled.
        groups = [
            group[torch.randperm(len(group))] for group in torch.arange(HEADS).view(n_old, -1)
        ]
        dealt = [part for group in groups for part in group.split(HEADS // n_kv_heads)]
        dealt = [dealt[at] for at in torch.randperm(n_kv_heads)]
        for kv, queries in enumerate(dealt):
            source = int(queries[0]) * n_old // HEADS
            turn = _turning(KINDS[name]).double()
            mix = torch.linalg.qr(torch.randn(D, D))[0].double() * (torch.rand(D, 1) + 0.5)
            into = slice(kv * len(queries), (kv + 1) * len(queries))
            changed = {"k": turn, "v": mix, "q": turn.inverse().T, "out": mix.inverse().T}
            for key in new:
                part = key.split(".")[0]
                at, to = (source, kv) if part in "kv" else (queries, into)
                new[key][to] = changed.get(part, torch.eye(1).double()) @ old[key][at]
    return wide


# Where queries take turns with keys and values only one of each group can be written in place.
PLANTED = [(name, n) for name in KINDS for n in (4, 8) if (name, n) != ("Falcon", 4)]


@pytest.mark.parametrize(("name", "n_kv_heads"), PLANTED)
def test_copies_turned_and_shuffled_are_found_again(name: str, n_kv_heads: int) -> None:
    target, called = _make(name, 2), KINDS[name].called
    wide = _plant(name, target, n_kv_heads)
    wanted, before = _answer(wide), fingerprint(wide)
    torch.testing.assert_close(wanted, _answer(target), rtol=0, atol=1e-9)
    told: list[GroupedLayer] = []
    small = group_heads(wide, 2, on_layer=told.append)
    torch.testing.assert_close(_answer(small), wanted, rtol=0, atol=1e-9)
    assert len(told) == 2
    assert all(abs(lost) < 1e-9 for one in told for lost in (one.keys_lost, one.values_lost))
    assert fingerprint(wide) == before
    assert (getattr(wide.config, called), getattr(small.config, called)) == (n_kv_heads, 2)
    assert {key: x.shape for key, x in small.named_parameters()} == {
        key: x.shape for key, x in target.named_parameters()
    }
    plain = group_heads(wide, 2, method="mean")
    assert (_answer(plain) - wanted).abs().max() > 0.01


def test_each_layer_tells_what_was_done() -> None:
    told: list[GroupedLayer] = []
    group_heads(_plant("Phi", _make("Phi", 2), 8), 2, on_layer=told.append)
    assert [one.name for one in told] == [f"model.layers.{at}.self_attn" for at in range(2)]
    assert {one.keys for one in told} == {"4 features mixed, 4 features rotated in pairs"}
    assert {one.values for one in told} == {"8 features mixed"}
    assert sorted(head for group in told[0].groups for head in group) == [*range(8)]
    group_heads(_make("Qwen3", 8), 2, on_layer=told.append)
    assert {one.keys for one in told[2:]} == {"averaged"}
    assert {one.values for one in told[2:]} == {"8 features mixed"}
    assert all(0 < one.keys_lost < 1 and 0 < one.values_lost < 1 for one in told[2:])


def test_what_is_clipped_is_only_averaged() -> None:
    model = zoo.make("Olmo")
    model.config.clip_qkv = 1e3  # nothing is, just now
    told: list[GroupedLayer] = []
    group_heads(model, 1, on_layer=told.append)
    assert {(one.keys, one.values) for one in told} == {("averaged", "averaged")}


@torch.no_grad()
def test_the_mean_is_the_mean_of_neighbors() -> None:
    model = _make("Qwen2", 8)
    told: list[GroupedLayer] = []
    small = group_heads(model, 2, method="mean", on_layer=told.append)
    for one, two in zip(_attentions(model), _attentions(small), strict=True):
        old, new = _heads(one, 8), _heads(two, 2)
        for part in old:
            wanted = old[part]
            if part[0] in "kv":
                wanted = wanted.unflatten(0, (2, 4)).mean(1)
            torch.testing.assert_close(new[part], wanted, rtol=0, atol=1e-12)
    assert told[0].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (told[0].keys, told[0].values) == ("averaged", "averaged")


@pytest.mark.parametrize("reference", [False, True])
def test_fitted_heads_lose_less_than_their_mean(reference: bool) -> None:
    model = _make("Llama", 8)
    given = {"reference": [{"input_ids": IDS}]} if reference else {}
    wanted = _answer(model)
    fit = _answer(group_heads(model, 4, **given)) - wanted
    mean = _answer(group_heads(model, 4, method="mean")) - wanted
    assert fit.norm() < 0.9 * mean.norm()


def test_padding_is_no_part_of_the_reference() -> None:
    model = _make("Llama", 8)
    left = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    padded = {name: nn.functional.pad(x, (0, 3)) for name, x in left.items()}
    one, two = (group_heads(model, 2, reference=[batch]) for batch in (left, padded))
    torch.testing.assert_close(_answer(one), _answer(two), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_shrinks_and_generation_goes_on(cache: str) -> None:
    target = _make("Llama", 2)
    wide = _plant("Llama", target, 8)
    small = group_heads(wide, 2)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    how |= {"cache_implementation": cache}
    one, two = (model.generate(input_ids=IDS[:1], **how) for model in (wide, small))
    assert torch.equal(one, two)
    for model, heads in ((wide, 8), (small, 2)):
        found = model(input_ids=IDS, use_cache=True).past_key_values
        assert {layer.keys.shape[1] for layer in found.layers} == {heads}


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


def test_what_was_frozen_stays_frozen_and_the_mode_stays() -> None:
    model = _make("Qwen2", 8).train()
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    small = group_heads(model, 2)
    asked = {key: x.requires_grad for key, x in small.named_parameters()}
    assert asked == {key: x.requires_grad for key, x in model.named_parameters()}
    assert all(module.training for module in small.modules())


def test_nothing_is_left_behind() -> None:
    model = _make("Llama", 8)
    before = modules_of(model)
    small = group_heads(model, 2)
    assert modules_of(model) == before
    assert not [hook for module in small.modules() for hook in module._forward_hooks]
    assert not [hook for module in small.modules() for hook in module._forward_pre_hooks]


# All whose configuration knows kv heads, besides those refused in tests/errors, and StableLm, of
# whose tiny heads positions would turn a feature and a half.
GROUPED = [
    pytest.param(name, marks=pytest.mark.full)
    for name in sorted(zoo.TEXT)
    if name in zoo._DECODERS and name not in ("Cohere", "Olmo2", "StableLm")
] + ["Gemma3", "Falcon"]


@pytest.mark.parametrize("name", GROUPED)
def test_every_architecture_can_be_grouped(name: str) -> None:
    model = zoo.make(name)
    small = group_heads(model, 1)
    sites = [one.site for one in find_attentions(small)]
    weights = [sum(x.numel() for x in one.parameters()) for one in (model, small)]
    assert weights[1] < weights[0]
    assert len(sites) == 2
