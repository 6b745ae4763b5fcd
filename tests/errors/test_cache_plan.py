"""Bad input to cache plans and their caches: one error, and nothing has changed."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from architectures import CASES
from architectures.decoders import make_decoder
from torch import Tensor, nn

import headwise as hw
from folders import tiny_llama
from headwise.caching import CachePlan, LayerCachePlan, retrieval_batches
from headwise.errors import (
    ArgumentError,
    HeadError,
    HeadwiseError,
    InputError,
    OutputError,
    ShapeError,
    UnsupportedError,
)
from oracles import modules_of
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


PADDED = torch.ones(1, 24)
PADDED[0, :5] = 0
WHOLE = torch.ones(1, 1, 12, 12, dtype=torch.bool)


def _masked(*masks: Tensor | None) -> Callable[[nn.Module, Any], object]:
    """Reading the text once under each mask."""
    return lambda model, cache: [read(model, cache, attention_mask=mask) for mask in masks]


def _cropped(*numbers: int) -> Callable[[nn.Module, Any], None]:
    def crop(model: nn.Module, cache: Any) -> None:
        read(model, cache)
        for n in numbers:
            before = cache.get_seq_length()
            try:
                cache.crop(n)
            except ArgumentError:
                assert cache.get_seq_length() == before
                raise

    return crop


def _eager(model: Any, cache: Any) -> None:
    model.set_attn_implementation("eager")
    read(model, cache, output_attentions=True)


def _without_a_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"cache": None}


def _skipping_a_layer(model: Any, cache: Any) -> None:
    model.model.layers[1].self_attn.register_forward_pre_hook(_without_a_cache, with_kwargs=True)
    read(model, cache)


def _updated(cache: Any, layer: int) -> None:
    with torch.no_grad():
        cache.update(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), layer)


@pytest.mark.parametrize(("use", "kind", "message"), [
    (_masked(PADDED[:, :12], torch.ones(1, 24)), ArgumentError,
     r"begin at columns \[0\], but at \[5\]"),
    (_masked(PADDED[:, :12], None), ArgumentError, "the attention mask is NoneType"),
    (_masked(None, PADDED), ArgumentError, r"begin at columns \[5\], but at \[0\]"),
    (_masked(PADDED[:, :12].flip(1)), ArgumentError,
     r"padding within or after texts.*columns \[0\]"),
    (_masked(WHOLE), ArgumentError, r"mask is \(1, 1, 12, 12\)"),
    *((_cropped(n), ArgumentError, rf"crop\({n}\) of 12 tokens") for n in (1, -13)),
    (_cropped(-2), ArgumentError, r"crop of 2 tokens of 12, .* the last 3 tokens"),
    (_cropped(-1, -1), ArgumentError, "crop of 1 tokens of 11"),
    *((lambda model, cache, name=name: read(model, cache, **{name: torch.zeros(1, 4, 12, 12)}),
       UnsupportedError, f"LlamaAttention gives {name} to its attention")
      for name in ("indices", "position_bias", "sinks")),
    (lambda model, cache: model(input_ids=IDS, cache=cache), ArgumentError, "require gradients"),
    (_eager, UnsupportedError, "LlamaAttention should return weights"),
    (lambda model, cache: read(model.train(), cache), UnsupportedError, "has dropout 0.25"),
    (_skipping_a_layer, UnsupportedError, "layer 1 of LlamaModel has cached 0 of 12 tokens"),
    (lambda _, cache: _updated(cache, 0), ArgumentError,
     "keys of 4 tokens outside of a forward pass"),
    (lambda _, cache: _updated(cache, 2), ArgumentError,
     "there is no layer 2; the plan has 2 layers"),
])  # fmt: skip
def test_what_a_cache_cannot_do(
    use: Callable[[nn.Module, Any], object], kind: type[HeadwiseError], message: str
) -> None:
    model = llama(attention_dropout=0.25)
    with plan().cache(model) as cache, pytest.raises(kind, match=message):
        use(model, cache)


@pytest.mark.parametrize(("make", "message"), [
    (partial(zoo.make, "Bert"), "BertSelfAttention attends in both directions"),
    (sharp_t5, "T5ForConditionalGeneration is an encoder-decoder"),
    (partial(zoo.make, "FalconMultiQuery"), "on cached keys outside of the attention"),
    (partial(zoo.make, "BloomForCausalLM"), "on cached keys outside of the attention"),
    (partial(zoo.make, "DeepseekV3"), "makes the keys of all heads from what it caches"),
    (lambda: CASES["MambaForCausalLM"].make()[0], "no layer of MambaForCausalLM caches keys"),
    (lambda: nn.Linear(3, 3), "Linear is not a model of transformers"),
])  # fmt: skip
def test_models_without_such_a_cache(make: Any, message: str) -> None:
    model = make()
    before = modules_of(model)
    with pytest.raises(UnsupportedError, match=message):
        hw.cache_plan(model, full={0: [0]}, window=3)
    assert modules_of(model) == before


# Goals, texts, and plans made by hand.


def _planned(model: nn.Module | None = None, **given: Any) -> CachePlan:
    texts = given.pop("texts", [{"input_ids": IDS}])
    return hw.cache_plan(model or llama(), texts, **{"window": 3, "sinks": 1} | given)


def _of(heads: dict[int, list[int]]) -> CachePlan:
    return CachePlan.of(heads, n_layers=2, n_kv_heads=2)


GOALS: list[tuple[dict[str, Any], str]] = [
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
    ({"keep": 0.5, "model": llama().model}, "'embedding' compares embeddings"),
]


@pytest.mark.parametrize(("call", "kind", "message"), [
    *((partial(_planned, **given), ArgumentError, message) for given, message in GOALS),
    *((partial(LayerCachePlan, 3, (None, window)), ArgumentError, rf"window={window} of L3\.KV1")
      for window in (0, 2.5, True)),
    (lambda: plan(sinks=-2), ArgumentError, "sinks=-2"),
    (lambda: CachePlan((LayerCachePlan(1, (None,)),)), ArgumentError, r"layers \[1\]"),
    (lambda: _of({5: [0]}), HeadError, r"no layer 5\. There are 2"),
    (lambda: _of({1: [7]}), HeadError, "L1.KV7"),
    (lambda: _of({1: [0, 0]}), HeadError, "L1.KV0"),
    (lambda: retrieval_batches(llama(), n=0), ArgumentError, "n=0"),
    (lambda: retrieval_batches(llama(), n_tokens=31), ArgumentError,
     "n_tokens=31. Give at least one text of 32 tokens or more"),
    (lambda: retrieval_batches(nn.Linear(2, 2)), ArgumentError,
     "only 0 tokens to draw from for a span of 8"),
])  # fmt: skip
def test_impossible_plans(
    call: Callable[[], object], kind: type[HeadwiseError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


LAYER = {"layer": 0, "windows": [None], "losses": [], "token_bytes": 32, "sliding_window": None}


@pytest.mark.parametrize(("change", "message"), [
    *((change, r"CachePlan\.load: .*plan.json holds no plan") for change in (
        {"format": "headwise-plan/1"},
        {"sinks": 1.5},
        {"layers": [LAYER | {"losses": [1, 2]}]},
        {"layers": [LAYER | {"token_bytes": -3}]},
        {"layers": [LAYER | {"sliding_window": 0}]},
        {"measured": 3},
    )),
    ({"layers": [LAYER | {"windows": [0]}]}, r"plan\.json holds no plan .*window=0 of L0\.KV0"),
])  # fmt: skip
def test_files_that_hold_no_plan(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = plan().save(tmp_path / "plan.json")
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(InputError, match=message):
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
