"""Counts from sizes equal the parameters and operations of real layers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from headwise.counts import PRESETS, layer_sizes, read_config
from headwise.counts._families import FAMILIES
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer, save
from headwise.layer import MultiHeadAttention

sizes = st.integers(1, 5)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that `layer_sizes` and `MultiHeadAttention` share."""
    n_kv_heads, group, head_dim = (draw(sizes) for _ in range(3))
    n_heads = n_kv_heads * group
    chosen = {"d_model": n_heads * draw(sizes), "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return chosen | ({"head_dim": head_dim} if draw(st.booleans()) else {})


def held(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


# Our layer.


@given(layers(), st.booleans(), st.booleans())
def test_each_projection_has_the_counted_parameters(
    arguments: dict[str, Any], bias: bool, out_proj: bool
):
    sizes = layer_sizes(**arguments, biases="QKVO" if bias else "", out_proj=out_proj)
    layer = MultiHeadAttention(**arguments, bias=bias, out_proj=out_proj)
    modules = {"Q": layer.q_proj, "K": layer.k_proj, "V": layer.v_proj, "O": layer.out_proj}
    actual = {role: held(module) for role, module in modules.items() if role != "O" or out_proj}
    assert sizes.parameters() == actual
    assert sum(actual.values()) == held(layer)


@given(layers(), st.integers(1, 7), st.integers(1, 7))
def test_each_projection_does_the_counted_multiplications(
    arguments: dict[str, Any], T: int, S: int
):
    layer = MultiHeadAttention(**arguments)
    done: dict[str, int] = {}

    def watch(role: str, module: nn.Linear) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
            done[role] = inputs[0].shape[:-1].numel() * module.weight.numel()

        module.register_forward_hook(hook)

    def watch_heads(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], __: Tensor) -> None:
        (_, H, T, D), (_, _, S, Dv) = inputs[0].shape, inputs[2].shape
        done.update(logits=H * T * S * D, mix=H * T * S * Dv)

    for role, name in zip("QKVO", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        watch(role, getattr(layer, name))
    layer.attention.register_forward_hook(watch_heads)
    key, value = torch.randn(1, S, layer.kdim), torch.randn(1, S, layer.vdim)
    layer(torch.randn(1, T, layer.d_model), key, value)
    assert done == layer_sizes(**arguments).multiply_adds(T, S)


# The formulas.


@given(st.integers(1, 6), sizes, st.integers(1, 50))
def test_the_number_of_heads_changes_no_cost(n_heads: int, head_dim: int, T: int):
    d = n_heads * head_dim
    for sizes in (layer_sizes(d, n_heads), layer_sizes(d, 1)):
        work = sizes.multiply_adds(T)
        assert sum(work[role] for role in "QKVO") == 4 * T * d**2
        assert work["logits"] + work["mix"] == 2 * T**2 * d
        assert sum(sizes.weights().values()) == 4 * d**2


@given(layers(), st.integers(1, 9), st.integers(1, 9))
def test_decoding_computes_each_key_once(arguments: dict[str, Any], T: int, more: int):
    sizes = layer_sizes(**arguments)
    first, later = sizes.multiply_adds(T), sizes.multiply_adds(more, cached=T)
    whole = sizes.multiply_adds(T + more)
    for role in "QKVO":
        assert first[role] + later[role] == whole[role]
    # Only hidden pairs are saved: the first queries never see later keys.
    hidden = T * more
    saved = {name: whole[name] - first[name] - later[name] for name in ("logits", "mix")}
    assert saved == {
        "logits": sizes.n_heads * hidden * sizes.head_dim,
        "mix": sizes.n_heads * hidden * sizes.head_dim,
    }


@given(layers(), st.integers(1, 5), st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
def test_a_cache_holds_the_keys_and_values(arguments: dict[str, Any], tokens: int, dtype: str):
    sizes = layer_sizes(**arguments)
    kept = [
        torch.empty(sizes.n_kv_heads, tokens, sizes.head_dim, dtype=getattr(torch, dtype))
        for _ in ("keys", "values")
    ]
    assert tokens * sizes.cache_bytes(dtype) == sum(tensor.nbytes for tensor in kept)


# Models of other libraries, built from their configurations without weights.

ROLES = {
    "bert": {"Q": r"self\.query\.", "K": r"self\.key\.", "V": r"self\.value\.",
             "O": r"attention\.output\.dense\."},
    "gpt2": {"QKV": r"attn\.c_attn\.", "O": r"attn\.c_proj\."},
    "llama": {role: rf"self_attn\.{role.lower()}_proj\." for role in "QKVO"},
    "mistral": {role: rf"self_attn\.{role.lower()}_proj\." for role in "QKVO"},
}  # fmt: skip
TINY = {
    "bert": {"hidden_size": 35, "num_attention_heads": 5, "num_hidden_layers": 3},
    "gpt2": {"n_embd": 21, "n_head": 3, "n_layer": 2},
    "llama": {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2,
              "head_dim": 14, "num_hidden_layers": 3, "attention_bias": True},
    "mistral": {"hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 2,
                "head_dim": 4, "num_hidden_layers": 5},
}  # fmt: skip


def built(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(config)


def projections(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Matrices and biases of attention layers, whatever their names in the model."""
    for name, weight in model.named_parameters():
        ours = re.search(r"att(n|ention)\b.*\.(\w+)\.(weight|bias)$", name)
        if ours and "norm" not in name.lower() and "relative" not in name:
            yield name, weight


@pytest.mark.parametrize("family", TINY)
def test_each_projection_of_a_tiny_model_has_the_counted_parameters(family: str, tmp_path: Path):
    config = AutoConfig.for_model(family, **TINY[family])
    config.save_pretrained(tmp_path)
    read, model = read_config(tmp_path), built(config)
    counted = read.layer.parameters()
    for roles, pattern in ROLES[family].items():
        actual = sum(w.numel() for name, w in model.named_parameters() if re.search(pattern, name))
        assert actual == read.n_layers * sum(counted[role] for role in roles), roles
    assert read.parameters() == sum(weight.numel() for _, weight in projections(model))


def shortened(family: str) -> PretrainedConfig:
    """The family's own sizes, in two layers."""
    config = AutoConfig.for_model(family)
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        if hasattr(config, name):
            setattr(config, name, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    if family == "gpt_neo":
        config.attention_types, config.attention_layers = [[["global"], 2]], ["global"] * 2
    return config


@pytest.mark.parametrize("on", [None, True, False], ids=["default", "on", "off"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"headwise"}))
def test_the_layers_of_every_known_family_have_the_counted_parameters(
    family: str, on: bool | None, tmp_path: Path
):
    config, switch = shortened(family), FAMILIES[family].switch
    if switch is not None and on is not None:
        setattr(config, switch, on)
    config.save_pretrained(tmp_path)
    if switch is not None and on is None:
        path = tmp_path / "config.json"
        held = json.loads(path.read_text("utf-8"))
        del held[switch]
        path.write_text(json.dumps(held), "utf-8")
        config = AutoConfig.from_pretrained(tmp_path)
    actual = sum(weight.numel() for _, weight in projections(built(config)))
    assert actual > 0
    assert read_config(tmp_path).parameters() == actual


OPTIONAL = ("num_key_value_heads", "num_kv_heads", "head_dim", "multi_query")


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"headwise"}))
def test_missing_sizes_default_to_those_of_the_family(family: str, tmp_path: Path):
    config = shortened(family)
    # 160 heads can share the keys and values of as many heads as any family has by itself.
    config.hidden_size, config.num_attention_heads = 1280, 160
    if family == "helium":  # its heads have a fixed width, which only this size fits
        config.hidden_size = 160 * 128
    held = {name: x for name, x in config.to_dict().items() if name not in OPTIONAL}
    (tmp_path / "config.json").write_text(json.dumps(held), "utf-8")
    model = built(AutoConfig.from_pretrained(tmp_path))
    actual = sum(weight.numel() for _, weight in projections(model))
    assert read_config(tmp_path).parameters() == actual


@pytest.mark.parametrize("family", ["falcon", "gpt_bigcode"])
@pytest.mark.parametrize("shared", [True, False])
def test_one_key_head_for_all_is_read_from_the_file(family: str, shared: bool, tmp_path: Path):
    config = AutoConfig.for_model(family, multi_query=shared, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    actual = sum(weight.numel() for _, weight in projections(built(config)))
    assert read_config(tmp_path).parameters() == actual


def test_our_own_checkpoints_are_counted(tmp_path: Path):
    words = ("<pad>", "<bos>", "<eos>", "<unk>")
    model = MiniGPT(MiniGPTConfig(len(words), d_model=12, n_heads=6, n_kv_heads=2, n_layers=3))
    read = read_config(save(model, make_tokenizer(words), tmp_path))
    assert read.parameters() == sum(held(block.attention) for block in model.blocks)
    assert (read.n_layers, read.layer.n_heads, read.layer.n_kv_heads) == (3, 6, 2)


# Presets.

VOCABULARY = {"bert": 30522, "gpt2": 50257, "llama": 32000, "mistral": 32000}
INNER = {"bert-large": 4096, "llama-7b": 11008, "llama-2-70b": 28672, "mistral-7b": 14336}


def family_of(name: str) -> str:
    return {"gpt3-175b": "gpt2", "mistral-7b": "mistral"}.get(name, re.split(r"\W", name)[0])


def config_of(name: str) -> PretrainedConfig:
    """The whole model of a preset, with the sizes that are not the attention's."""
    model, family = PRESETS[name], family_of(name)
    layer = model.layer
    if family == "gpt2":
        sizes = {"n_embd": layer.d_model, "n_head": layer.n_heads, "n_layer": model.n_layers,
                 "n_positions": 2048 if name == "gpt3-175b" else 1024}  # fmt: skip
    else:
        sizes = {"hidden_size": layer.d_model, "num_attention_heads": layer.n_heads,
                 "num_hidden_layers": model.n_layers}  # fmt: skip
        sizes |= {"intermediate_size": INNER[name]} if name in INNER else {}
    if family in ("llama", "mistral"):
        sizes |= {"num_key_value_heads": layer.n_kv_heads, "tie_word_embeddings": False}
    return AutoConfig.for_model(family, vocab_size=VOCABULARY[family], **sizes)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_model_of_its_name(name: str, tmp_path: Path):
    preset, config = PRESETS[name], config_of(name)
    config.save_pretrained(tmp_path)
    read = read_config(tmp_path)
    assert (read.layer, read.n_layers) == (preset.layer, preset.n_layers)
    whole = AutoModelForCausalLM if family_of(name) in ("llama", "mistral") else AutoModel
    with torch.device("meta"):
        assert held(whole.from_config(config)) == preset.all_parameters
