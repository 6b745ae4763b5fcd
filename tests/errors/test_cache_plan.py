"""Bad input to cache plans and their caches: one error, and nothing has changed."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from architectures import CASES
from architectures.decoders import make_decoder
from torch import Tensor, nn

import headwise as hw
from folders import tiny_llama
from headwise.caching import CachePlan, CacheScores, LayerCachePlan, retrieval_batches
from headwise.errors import (
    ArgumentError,
    HeadError,
    InputError,
    OutputError,
    ShapeError,
    UnsupportedError,
)
from planted_pairs import sharp_t5

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8,
    "vocab_size": 19, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.arange(3, 15)[None]


def llama(seed: int = 0, **more: Any) -> nn.Module:
    return tiny_llama(seed, **SIZES | more)


def plan(**more: Any) -> CachePlan:
    how: dict[str, Any] = {"n_layers": 2, "n_kv_heads": 2, "window": 3, "sinks": 1} | more
    return CachePlan.of({0: [1]}, **how)


def read(model: nn.Module, cache: Any, ids: Tensor = IDS, **more: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, cache=cache, use_cache=True, **more)


@pytest.mark.parametrize("window", [0, -1, 2.5, True])
def test_a_window_is_a_number_of_tokens(window: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"window={window!r} of L3.KV1"):
        LayerCachePlan(3, (None, window))


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: plan(sinks=-2), ArgumentError, "sinks=-2"),
    (lambda: CachePlan((LayerCachePlan(1, (None,)),)), ArgumentError, r"layers \[1\]"),
    (lambda: CachePlan.of({5: [0]}, n_layers=2, n_kv_heads=2), HeadError, "no layer 5 of 2"),
    (lambda: CachePlan.of({1: [7]}, n_layers=2, n_kv_heads=2), HeadError, "L1.KV7"),
    (lambda: CachePlan.of({1: [0, 0]}, n_layers=2, n_kv_heads=2), HeadError, "L1.KV0"),
    (lambda: CacheScores(((0, 0),), np.zeros((2, 3)), "mass"), ShapeError,
     r"1 kv heads, values of \(2, 3\)"),
])  # fmt: skip
def test_plans_of_impossible_heads(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_a_plan_of_another_model() -> None:
    first, second = llama(), llama(1)
    made = hw.cache_plan(first, full={0: [1]}, window=3)
    with pytest.raises(ArgumentError, match=f"weights {made.model}, this LlamaForCausalLM"):
        made.cache(second)
    with pytest.raises(
        ArgumentError, match="plan has 2 layers, LlamaForCausalLM has 3 that attend"
    ):
        plan().cache(llama(num_hidden_layers=3))
    wrong = plan(n_kv_heads=4)
    with (
        pytest.raises(ArgumentError, match="layer 0 has 2 kv heads, the plan has 4"),
        wrong.cache(first) as cache,
    ):
        read(first, cache)
    with plan().cache(first) as cache:
        with pytest.raises(ArgumentError, match="keys of 12 tokens outside of a forward pass"):
            read(second, cache)
        layer, other = first.model.layers[0], second.model.layers[0]
        own, layer.self_attn = layer.self_attn, other.self_attn
        with pytest.raises(ArgumentError, match="LlamaAttention belongs to another model"):
            read(first, cache)
        layer.self_attn = own


def test_a_model_that_reads_keys_past_the_cache() -> None:
    model = make_decoder("dory")
    assert model is not None
    model.config.recurrent_kv_cache_mode = "last_loop"
    with hw.cache_plan(model, full={}).cache(model) as cache, torch.no_grad():
        model(IDS, cache=cache)
        with pytest.raises(UnsupportedError, match="reads the keys of layer 0 past the cache"):
            model(IDS[:, :1], cache=cache)


def test_a_cache_used_for_another_text() -> None:
    model = llama()
    how: Mapping[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with plan().cache(model) as cache:
        model.generate(IDS, cache=cache, **how)
        n = cache.get_seq_length()
        for other in (IDS.flip(1), IDS.repeat(1, 2), IDS[:, :3]):
            with pytest.raises(ArgumentError, match=f"1 x {n} tokens of another text than these 1"):
                model.generate(other, cache=cache, **how)
        assert cache.get_seq_length() == n
        with pytest.raises(ArgumentError, match=r"mask of 12 columns, but 13 tokens"):
            read(model, cache, attention_mask=torch.ones_like(IDS))
        with pytest.raises(ShapeError, match="3 texts, but the cache holds 1"):
            read(model, cache, IDS.repeat(3, 1))
        cache.reset()
        read(model, cache, IDS.flip(1))
    with pytest.raises(ArgumentError, match="whose block has ended"):
        read(model, cache)


def test_texts_that_begin_elsewhere() -> None:
    model = llama()
    padded = torch.ones(1, 24)
    padded[0, :5] = 0
    with plan().cache(model) as cache:
        read(model, cache, attention_mask=padded[:, :12])
        with pytest.raises(ArgumentError, match=r"begin at columns \[0\], but at \[5\]"):
            read(model, cache, attention_mask=torch.ones(1, 24))
        with pytest.raises(ArgumentError, match=r"the attention mask is NoneType"):
            read(model, cache)
    with plan().cache(model) as cache:
        read(model, cache)
        with pytest.raises(ArgumentError, match=r"begin at columns \[5\], but at \[0\]"):
            read(model, cache, attention_mask=padded)
    with plan().cache(model) as cache:
        with pytest.raises(ArgumentError, match=r"padding within or after texts.*columns \[0\]"):
            read(model, cache, attention_mask=padded[:, :12].flip(1))
        with pytest.raises(ArgumentError, match=r"mask is \(1, 1, 12, 12\)"):
            read(model, cache, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))


def test_what_cannot_be_taken_back() -> None:
    model = llama()
    with plan().cache(model) as cache:
        read(model, cache)
        for n in (1, -13):
            with pytest.raises(ArgumentError, match=rf"crop\({n}\) of 12 tokens"):
                cache.crop(n)
        with pytest.raises(ArgumentError, match=r"crop of 2 tokens of 12, .* the last 3 tokens"):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        cache.crop(-1)
        with pytest.raises(ArgumentError, match="crop of 1 tokens of 11"):
            cache.crop(-1)


def test_gradients_weights_and_dropout_are_refused() -> None:
    model = llama(attention_dropout=0.25)
    with plan().cache(model) as cache, pytest.raises(ArgumentError, match="require gradients"):
        model(input_ids=IDS, cache=cache)
    model.set_attn_implementation("eager")
    weights = pytest.raises(UnsupportedError, match="LlamaAttention should return weights")
    with plan().cache(model) as cache, weights:
        read(model, cache, output_attentions=True)
    model.train()
    with plan().cache(model) as cache, pytest.raises(UnsupportedError, match=r"has dropout 0.25"):
        read(model, cache)


@pytest.mark.parametrize("name", ["indices", "position_bias", "sinks"])
def test_attention_that_adds_to_the_logits_is_refused(name: str) -> None:
    model = llama()
    with plan().cache(model) as cache:
        with pytest.raises(UnsupportedError, match=f"LlamaAttention gives {name} to its attention"):
            read(model, cache, **{name: torch.zeros(1, 4, 12, 12)})
        cache.reset()
        read(model, cache)


def _caches_nothing(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"cache": None}


def test_a_layer_that_does_not_cache() -> None:
    model = llama()
    model.model.layers[1].self_attn.register_forward_pre_hook(_caches_nothing, with_kwargs=True)
    with (
        pytest.raises(UnsupportedError, match="layer 1 of LlamaModel has cached 0 of 12 tokens"),
        plan().cache(model) as cache,
    ):
        read(model, cache)


def test_keys_outside_of_a_forward_pass() -> None:
    model = llama()
    with plan().cache(model) as cache, torch.no_grad():
        with pytest.raises(ArgumentError, match="keys of 4 tokens outside of a forward pass"):
            cache.update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), 0)
        with pytest.raises(ArgumentError, match="there is no layer 2; the plan has 2 layers"):
            cache.update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(zoo.make, "Bert"), "BertSelfAttention attends in both directions"),
        (sharp_t5, "T5ForConditionalGeneration is an encoder-decoder"),
        (partial(zoo.make, "FalconMultiQuery"), "on cached keys outside of the attention"),
        (partial(zoo.make, "BloomForCausalLM"), "on cached keys outside of the attention"),
        (partial(zoo.make, "DeepseekV3"), "makes the keys of all heads from what it caches"),
        (lambda: CASES["MambaForCausalLM"].make()[0], "no layer of MambaForCausalLM caches keys"),
        (lambda: nn.Linear(3, 3), "Linear is not a model of transformers"),
    ],
)
def test_models_without_such_a_cache(make: Any, message: str) -> None:
    model = make()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedError, match=message):
        hw.cache_plan(model, full={0: [0]}, window=3)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before


TEXTS = [{"input_ids": IDS}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "full=None, keep=None, bytes=None, loss=None"),
        ({"keep": 0.5, "loss": 1.0}, "keep=0.5, bytes=None, loss=1.0"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"keep": "half"}, "keep='half'"),
        ({"bytes": -1}, "bytes=-1"),
        ({"loss": float("nan")}, "loss=nan"),
        ({"keep": 0.5, "window": 0}, r"window=0"),
        ({"keep": 0.5, "window": ()}, r"window=\(\)"),
        ({"keep": 0.5, "window": 2.5}, r"window=2.5"),
        ({"keep": 0.5, "window": (2, None)}, r"window=\(2, None\)"),
        ({"full": [0]}, r"full=\[0\]"),
        ({"full": {0: 0}}, r"full=\{0: 0\}"),
        ({"keep": 0.5, "sinks": -1}, "sinks=-1"),
        ({"keep": 0.5, "texts": None}, "keep=0.5 without texts"),
        ({"keep": 0.5, "window": 99}, "keep all 12 tokens .*over 100 tokens, or a window up to 10"),
        ({"bytes": 1}, "bytes=1, but the windows alone take"),
        ({"full": {0: [0]}, "window": (2, 3)}, r"window=\(2, 3\)"),
        ({"keep": 0.5, "texts": [{"inputs_embeds": torch.zeros(1, 9, 16)}]}, "inputs_embeds"),
    ],
)
def test_goals_and_texts(arguments: dict[str, Any], message: str) -> None:
    texts = arguments.pop("texts", TEXTS)
    with pytest.raises(ArgumentError, match=message):
        hw.cache_plan(llama(), texts, **{"window": 3, "sinks": 1} | arguments)


def test_a_model_without_a_head_has_no_loss_of_tokens() -> None:
    with pytest.raises(ArgumentError, match="'embedding' compares embeddings"):
        hw.cache_plan(llama().model, TEXTS, keep=0.5, window=3, sinks=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"n_tokens": 31}, "n_tokens=31. Give at least one text of 32 tokens or more"),
    ],
)
def test_retrieval_texts_that_cannot_be_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        retrieval_batches(llama(), **arguments)
    with pytest.raises(ArgumentError, match="only 0 tokens to draw from for a span of 8"):
        retrieval_batches(nn.Linear(2, 2))


LAYER = {"layer": 0, "windows": [None], "losses": [], "token_bytes": 32, "sliding_window": None}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "headwise-plan/1"},
        {"sinks": 1.5},
        {"layers": [LAYER | {"losses": [1, 2]}]},
        {"layers": [LAYER | {"token_bytes": -3}]},
        {"layers": [LAYER | {"sliding_window": 0}]},
        {"measured": 3},
    ],
)
def test_files_that_hold_no_plan(tmp_path: Path, change: dict[str, Any]) -> None:
    path = plan().save(tmp_path / "plan.json")
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(InputError, match=r"CachePlan.load: .*plan.json holds no plan"):
        CachePlan.load(path)


def test_a_plan_file_with_a_window_of_zero(tmp_path: Path) -> None:
    path = plan().save(tmp_path / "plan.json")
    path.write_text(path.read_text("utf-8").replace(" 3", " 0"), "utf-8")
    with pytest.raises(ArgumentError, match=r"window=0 of L0.KV0"):
        CachePlan.load(path)


def test_patterns_of_duo_attention(tmp_path: Path) -> None:
    several = CachePlan((LayerCachePlan(0, (3, 4)),))
    with pytest.raises(ArgumentError, match=r"windows \[3, 4\] and \[2\] kv heads"):
        hw.save_duo_attention(several, tmp_path / "several")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file cannot be written"):
        hw.save_duo_attention(plan(), tmp_path / "file")
    folder = hw.save_duo_attention(plan(), tmp_path / "pattern")
    with pytest.raises(ArgumentError, match=r"keep=1\.2"):
        hw.load_duo_attention(folder, keep=1.2)
    table = folder / "full_attention_heads.tsv"
    for text, message in (
        ("1\t2\n3\n", "number of columns changed from 2 to 1"),
        ("1\tnan\n", "some numbers are not finite"),
        ("\n", "input contained no data"),
        ("1\tx\n", "could not convert string 'x' to float"),
        ("0\n" * (1 << 22), "8388608 bytes"),
    ):
        table.write_text(text, "utf-8")
        with pytest.raises(InputError, match=message):
            hw.load_duo_attention(folder)
    table.unlink()
    with pytest.raises(InputError, match=r"full_attention_heads.tsv cannot be read"):
        hw.load_duo_attention(folder)
    (folder / "config.json").write_text("{}")
    table.write_text("1\t0\n")
    with pytest.raises(InputError, match=r"config.json holds no pattern"):
        hw.load_duo_attention(folder)
