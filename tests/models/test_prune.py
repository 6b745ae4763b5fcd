"""Pruning heads equals ablating them for every supported architecture."""

import json
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import zoo
from architectures import CASES
from torch import Tensor, nn

from folders import tiny_gemma, tiny_llama
from headwise import (
    Evidence,
    HeadTable,
    MultiHeadAttention,
    Plan,
    ablate,
    find_roles,
    importance,
    load,
    observe,
    prune,
    save,
)
from headwise.errors import InputError, UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import fingerprint
from headwise.ownership import example_input, find_attentions, heads_of
from headwise.roles.evidence._nulls import permuted
from oracles import padded
from planted import TOKENIZER, lines
from tiers import crossed, diagonal, tiers

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
# Other heads in each layer; two of four, one of each group of two.
REMOVE = {0: [1, 3], 1: [0, 2]}

# Why these cannot be pruned.
BOUND = "Something else depends on which heads there are"
REFUSED = {
    "Albert": "is shared by several layers, which would keep different heads",
    "CodeGenForCausalLM": BOUND,  # each of its weights has four blocks of heads
    "Olmo2": "the queries of the heads of .* depend on one another",
}
FLOAT32 = ("Gemma2", "XGLMForCausalLM")  # their masks do not fit float64


def _model(name: str) -> nn.Module:
    model = zoo.make(name, torch.float32 if name in FLOAT32 else torch.float64)
    with torch.no_grad():
        for bias in model.parameters():  # biases of zeros prove nothing
            if bias.ndim == 1:
                bias.add_(0.3 * torch.randn_like(bias))
    return model


def _batch() -> dict[str, Tensor]:
    batch = padded(TEXTS, "right")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def _gap(model: nn.Module, small: nn.Module, gone: Any, **options: Any) -> float:
    batch = _batch()
    with ablate(model, gone, **options):
        expected = model(**batch)[0]
    real = batch["attention_mask"].bool()  # outputs at padding may be NaN
    assert not torch.allclose(model(**batch)[0][real], expected[real], atol=1e-3)
    return (small(**batch)[0] - expected)[real].abs().max().item()


@pytest.mark.parametrize("name", zoo.mixing())
def test_a_pruned_model_equals_the_ablated_one(name: str) -> None:
    model = _model(name)
    before = fingerprint(model)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            prune(model, REMOVE)
    else:
        small = prune(model, REMOVE)
        assert _gap(model, small, REMOVE) <= (1e-5 if name in FLOAT32 else 1e-12)
        parts = find_attentions(small)
        assert [part.site.n_heads for part in parts] == [2, 2]
        assert sum(x.numel() for x in small.parameters()) < sum(
            x.numel() for x in model.parameters()
        )
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "name", tiers(["Bert", "FalconMultiQuery", "Phi3"], ["GPT2", "Llama", "GptOss"])
)
def test_layers_may_keep_different_numbers_of_heads(name: str) -> None:
    model = _model(name)
    gone = {0: [0, 1], 1: [1, 2, 3]}
    assert _gap(model, prune(model, gone), gone) <= 1e-12


@pytest.mark.parametrize("name", tiers(["Phi3", "GptOss"], ["Llama", "Cohere"]))
def test_uneven_groups_are_equalised_on_request(name: str) -> None:
    model = _model(name)
    gone = {0: [1], 1: [3]}
    with pytest.raises(UnsupportedError, match="would keep 1 of kv head 0, 2 of kv head 1"):
        prune(model, gone)
    small = prune(model, gone, expand=True)
    assert _gap(model, small, gone) <= 1e-12
    assert find_attentions(small)[0].site.n_kv_heads == 3


@pytest.mark.parametrize(
    "name", tiers(["BloomForCausalLM", "MPNetModel"], ["FalconAlibi", "MptForCausalLM"])
)
def test_position_biases_are_pruned_with_their_heads(name: str) -> None:
    model = _model(name)
    gone = {0: [0, 1], 1: [1, 2, 3]}
    once = prune(model, gone)
    assert _gap(model, once, gone) <= 1e-12
    # The remaining heads are renumbered, and the model keeps their original numbers.
    assert _gap(model, prune(once, {0: [0]}), {0: [0, 1, 2], 1: [1, 2, 3]}) <= 1e-12


@pytest.mark.parametrize(
    "gone",
    [
        {2: [0, 2]},  # one of each group of a layer that reads the keys of layer 0
        {0: [0, 2], 3: [1, 3]},
        {0: [0, 1], 2: [0, 1]},  # a whole group of both
        {layer: [0] for layer in range(4)},  # each query with keys of its own, in all of them
    ],
)
def test_layers_that_read_keys_of_others_are_cut(gone: dict[int, list[int]]) -> None:
    model = tiny_gemma().double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0)
    small = prune(model, gone, expand=True)
    assert _gap(model, small, gone) <= 1e-10


def test_layers_that_share_weights_lose_the_same_heads() -> None:
    model = _model("Albert")
    gone = [(0, 1), (1, 1)]
    assert _gap(model, prune(model, gone), gone) <= 1e-12


@pytest.mark.parametrize(
    "name", tiers(["Bert", "GPTJForCausalLM"], ["GPT2", "Llama", "FalconMultiQuery"])
)
def test_a_folded_model_equals_the_mean_ablated_one(name: str) -> None:
    model = _model(name)
    reference = [_batch()]
    small = prune(model, REMOVE, fold="mean", reference=reference)
    assert _gap(model, small, REMOVE, mode="mean", reference=reference) <= 1e-12


@pytest.mark.parametrize(
    ("name", "cache"),
    tiers(
        [("Falcon", "dynamic"), ("GptOss", "static"), ("Llama", "dynamic")],
        product(["GPT2", "GptOss", "Llama", "Phi3", "Qwen3"], ["dynamic", "static"]),
    ),
)
def test_generation_is_equal_token_for_token(name: str, cache: str) -> None:
    model = _model(name)
    gone = {0: [1, 3], 1: [0, 1]}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache}
    prompt = {"input_ids": torch.tensor([TEXTS[0]])}
    with ablate(model, gone):
        expected = model.generate(**prompt, **options)
    assert torch.equal(prune(model, gone).generate(**prompt, **options), expected)


def test_removing_a_whole_group_shrinks_the_cache() -> None:
    model = _model("Llama")
    small = prune(model, {0: [0, 1], 1: [0, 1]})
    for module, heads in ((model, 2), (small, 1)):
        cache = module(**_batch(), use_cache=True).cache
        assert {layer.keys.shape[1] for layer in cache.layers} == {heads}


SEVERAL = ("BartForConditionalGeneration", "ViTModel", "WhisperForConditionalGeneration")
_FEW = ("CLIPModel", "T5ForConditionalGeneration")


@pytest.mark.parametrize("name", tiers(_FEW, SEVERAL))
@torch.no_grad()
def test_stacks_and_towers_are_pruned(name: str) -> None:
    model, _ = CASES[name].make()
    model = model if name.startswith("T5") else model.double()  # it computes in single precision
    for weight in model.parameters():
        weight.mul_(3)
    heads = heads_of(find_attentions(model))
    # In T5 all layers share the position biases of the first.
    gone = [head for head in heads if head.head in ((1, 3), (0, 2))[head.layer]]
    small, batch = prune(model, gone), example_input(model)
    with ablate(model, gone):
        expected = model(**batch)
    assert not torch.allclose(model(**batch)[0], expected[0], atol=1e-6)
    tolerance = 1e-5 * expected[0].abs().max().item() if name.startswith("T5") else 1e-12
    torch.testing.assert_close(small(**batch)[0], expected[0], rtol=0, atol=tolerance)


# Different numbers in each layer of a stack, one of which is unpruned.
T5_GONE = ["encoder.L0.H1", "encoder.L0.H3", "encoder.L1.H0", "decoder.L1.H0", "decoder.L1.H1"]
T5_GONE += ["decoder.L1.H3", "decoder.cross.L0.H0", "decoder.cross.L1.H1", "decoder.cross.L1.H2"]


def _t5() -> nn.Module:
    """Position biases so large that heads with the wrong biases give another output."""
    model, _ = CASES["T5ForConditionalGeneration"].make()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(30 if "relative" in name else 3)
    return model


@torch.no_grad()
def _t5_gap(model: nn.Module, small: nn.Module, gone: list[str]) -> float:
    batch = example_input(model)
    with ablate(model, gone):
        expected = model(**batch).logits
    assert not torch.allclose(model(**batch).logits, expected, rtol=0.01)
    return ((small(**batch).logits - expected).abs().max() / expected.abs().max()).item()


def test_layers_of_t5_prune_the_position_biases_of_the_first() -> None:
    model = _t5()
    small = prune(model, T5_GONE)
    assert _t5_gap(model, small, T5_GONE) <= 1e-5
    # The remaining heads are renumbered, and the model keeps their original numbers.
    more = ["encoder.L0.H0", "decoder.L0.H2"]
    assert _t5_gap(model, prune(small, more), [*T5_GONE, *more]) <= 1e-5
    assert _t5_gap(model, deepcopy(small), T5_GONE) <= 1e-5


@pytest.mark.parametrize("cache", tiers(["static"], ["dynamic"]))
def test_a_t5_with_other_heads_in_each_layer_generates_the_same(cache: str) -> None:
    model = _t5()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"cache_implementation": cache}
    prompt = torch.tensor([TEXTS[0]])
    with ablate(model, T5_GONE):
        expected = model.generate(prompt, **options)
    assert torch.equal(prune(model, T5_GONE).generate(prompt, **options), expected)


@pytest.mark.parametrize("where", tiers(["model.layers.0.self_attn"], [""]))
@torch.no_grad()
def test_a_copy_runs_nothing_that_was_compiled_of_the_model(where: str) -> None:
    model, ids = tiny_llama(), torch.tensor([[1, 5, 3]])
    whole, expected = (each(ids).logits for each in (model, prune(model, {0: [0, 1]})))
    module = model.get_submodule(where)
    module.forward = torch.compile(module.forward, backend="eager")
    torch.testing.assert_close(prune(model, {0: [0, 1]})(ids).logits, expected)
    null = permuted(model)
    assert null is not None
    assert not torch.allclose(null(ids).logits, whole)


OURS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "grouped": {"n_kv_heads": 2},
    "gated": {"gate": True, "bias": True},
    "normed": {"qk_norm": True, "v_head_dim": 5},
}


@pytest.mark.parametrize(("name", "fold"), crossed([*OURS, "Mini-GPT"], [None, "mean"]))
@torch.no_grad()
def test_our_models_are_pruned(name: str, fold: Literal["mean"] | None) -> None:
    torch.manual_seed(0)
    if name == "Mini-GPT":
        model: Any = MiniGPT(MiniGPTConfig(13, 8, 12, 4, n_layers=2)).eval().double()
        batch: dict[str, Any] = {"input_ids": torch.tensor([[1, 5, 3], [7, 2, 2]])}
    else:
        model, batch = MultiHeadAttention(12, 4, **OURS[name]).double(), {"query": X}
    gone = REMOVE if name == "Mini-GPT" else [(0, 0), (0, 3)]
    reference = [batch] if fold else None
    small = prune(model, gone, fold=fold, reference=reference)
    with ablate(model, gone, fold or "zero", reference):
        expected = model(**batch)
    torch.testing.assert_close(small(**batch), expected, rtol=0, atol=1e-12)
    layer, cut = (m.blocks[0].attention if name == "Mini-GPT" else m for m in (model, small))
    assert (layer.n_heads, cut.n_heads) == (4, 2)
    assert cut.q_proj.out_features == 2 * layer.head_dim


def test_a_plan_removes_its_heads() -> None:
    model = _model("Llama")
    heads = heads_of(find_attentions(model))
    plan = Plan.of(REMOVE, heads, model=fingerprint(model), why="by hand")
    first, second = (prune(model, request) for request in (plan, REMOVE))
    assert fingerprint(first) == fingerprint(second)


def test_frozen_parameters_and_the_mode_are_kept() -> None:
    model = _model("Llama").train()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    small = prune(model, REMOVE)
    trained = {name: x.requires_grad for name, x in small.named_parameters()}
    assert trained == {name: x.requires_grad for name, x in model.named_parameters()}
    assert small.training
    assert all(module.training for module in small.modules())


# Torch's own layers are pruned, and their callers need no change.


B, T, S, H = 3, 5, 7, 4
GONE = [(0, 1), (0, 3)]
LENGTHS = (5, 2, 4)
DRAWN = torch.Generator().manual_seed(5)
INPUTS, MEMORY = (torch.randn(B, n, 12, generator=DRAWN, dtype=torch.float64) for n in (T, S))
PADDING = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]  # True = padding
CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)  # True = hidden
OF_HEADS = torch.rand(B * H, T, T, generator=DRAWN) < 0.3
OF_HEADS[..., 0] = False  # every query sees a key

SELF, ACROSS = (INPUTS,) * 3, (INPUTS, MEMORY, MEMORY)
# How a layer is made, its queries, keys and values, and what else its call is given.
CALLS: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": ({}, SELF, {}),
    "padded": ({}, SELF, {"key_padding_mask": PADDING}),
    "causal": ({}, SELF, {"attn_mask": CAUSAL, "is_causal": True}),
    "both": ({}, SELF, {"key_padding_mask": PADDING, "attn_mask": CAUSAL}),
    "of heads": ({}, SELF, {"attn_mask": OF_HEADS}),
    "added": ({}, SELF, {
        "attn_mask": torch.randn(B * H, T, T, generator=DRAWN, dtype=torch.float64),
        "key_padding_mask": torch.zeros(B, T).double().masked_fill(PADDING, float("-inf")),
    }),
    "one text": ({}, (INPUTS[0],) * 3, {"key_padding_mask": PADDING[1]}),
    "no bias": ({"bias": False}, ACROSS, {}),
    "widths": ({"kdim": 6, "vdim": 10}, (INPUTS, MEMORY[..., :6], MEMORY[..., :10]), {}),
}  # fmt: skip


def _layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(12, H, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        for bias in layer.parameters():
            bias.add_(0.3 * torch.randn_like(bias))
    return layer


@pytest.mark.parametrize(("call", "first"), diagonal(CALLS, (True, False)))
@torch.no_grad()
def test_a_pruned_layer_equals_the_ablated_one_in_every_call(call: str, first: bool) -> None:
    made, inputs, how = CALLS[call]
    layer = _layer(batch_first=first, **made)
    qkv = [x if first or x.ndim == 2 else x.transpose(0, 1) for x in inputs]
    with ablate(layer, GONE):
        expected, _ = layer(*qkv, **how)
    small = prune(layer, GONE)
    output, weights = small(*qkv, **how)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    of_all = layer(*qkv, **how, average_attn_weights=False)[1]
    kept = of_all.index_select(-3, torch.tensor([0, 2]))
    torch.testing.assert_close(weights, kept.mean(-3), rtol=0, atol=1e-12)
    assert small(*qkv, **how, need_weights=False)[1] is None
    of_each = small(*qkv, **how, average_attn_weights=False)[1]
    torch.testing.assert_close(of_each, kept, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_layer_can_be_pruned_again_and_takes_masks_of_all_heads() -> None:
    layer = _layer(batch_first=True)
    twice = prune(prune(layer, [(0, 1)]), [(0, 2)])  # the fourth head is now the third
    with ablate(layer, GONE):
        expected, _ = layer(INPUTS, INPUTS, INPUTS, attn_mask=OF_HEADS)
    torch.testing.assert_close(
        twice(INPUTS, INPUTS, INPUTS, attn_mask=OF_HEADS)[0], expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("nested", "fold"), [(True, None), (False, "mean")])
@torch.no_grad()
def test_an_encoder(nested: bool, fold: Any) -> None:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(12, H, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    gone = {0: [1, 3], 1: [0]}
    reference = [(INPUTS,)] if fold else None
    small = prune(model, gone, fold=fold, reference=reference)
    with ablate(model, gone, fold or "zero", reference):
        expected = model(INPUTS, src_key_padding_mask=PADDING)
    output = small(INPUTS, src_key_padding_mask=PADDING)
    torch.testing.assert_close(output[~PADDING], expected[~PADDING], rtol=0, atol=1e-12)
    with observe(small) as watch:
        small(INPUTS)
    assert [head.head for head in watch.table().heads] == [0, 1, 0, 1, 2]
    assert sum(x.numel() for x in small.parameters()) < sum(x.numel() for x in model.parameters())


@torch.no_grad()
def test_a_decoder_loses_heads_of_both_kinds() -> None:
    torch.manual_seed(4)
    layer = nn.TransformerDecoderLayer(12, H, 16, batch_first=True, dtype=torch.float64)
    model = nn.TransformerDecoder(layer, 2).eval()
    gone = ["L0.H1", "cross.L1.H2"]
    small = prune(model, gone, reference=[(INPUTS, MEMORY)])
    with ablate(model, gone):
        expected = model(INPUTS, MEMORY, tgt_mask=CAUSAL)
    torch.testing.assert_close(small(INPUTS, MEMORY, tgt_mask=CAUSAL), expected, rtol=0, atol=1e-12)


# A pruned or grouped model and its tables know which of the original heads it has.


IDS = torch.tensor([[9, 7, 12, 11, 8, 14, 10], [10, 9, 13, 12, 9, 8, 17]])
GONE_FIRST = {0: [0, 1], 1: [2, 3]}
LEFT = ["L0.H2", "L0.H3", "L1.H0", "L1.H1"]


def _table(model: nn.Module, **inputs: Any) -> HeadTable:
    with observe(model) as watch, torch.no_grad():
        model(**(inputs or {"input_ids": IDS}))
    return watch.table()


def _original(model: nn.Module) -> list[str]:
    return _table(model).frame()["original"].tolist()


def test_the_table_of_an_unpruned_model_has_no_original_column() -> None:
    table = _table(zoo.make("Llama"))
    assert table.original == ()
    assert "original" not in table.frame()


def test_pruning_a_pruned_model_composes() -> None:
    small = prune(zoo.make("Llama"), GONE_FIRST)
    assert _original(small) == LEFT
    assert _original(prune(small, {0: [0]}, expand=True)) == ["L0.H3", "L1.H0", "L1.H1"]
    assert _original(small) == LEFT


def test_statistics_equal_those_of_the_original_heads() -> None:
    model = zoo.make("Llama")
    small, whole = _table(prune(model, {0: [0, 1]})), _table(model)
    for head, was in zip(small.heads, small.original, strict=True):
        if head.layer == 0:  # later layers read something else
            actual, expected = (
                t.mean("entropy")[t.row(h)] for t, h in ((small, head), (whole, was))
            )
            assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("format", ["headwise", "stock", "remote-code"])
def test_every_format_records_the_original_heads(format: Any, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()  # an empty folder may be written into
    folder = save(prune(zoo.make("Llama"), GONE_FIRST), tmp_path / "small", format=format)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["original_heads"] == {"L0": [2, 3], "L1": [0, 1]}
    if format != "remote-code":
        assert _original(load(folder)) == LEFT


def test_padded_heads_have_no_original(tmp_path: Path) -> None:
    folder = save(prune(zoo.make("Llama"), GONE_FIRST), tmp_path / "small", format="padded")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["original_heads"] == {"L0": [2, 3, None, None], "L1": [0, 1, None, None]}
    padded = load(folder)
    assert _original(padded) == [*LEFT[:2], "", "", *LEFT[2:], "", ""]
    assert _original(prune(padded, {0: [2, 3], 1: [0, 1]})) == ["L0.H2", "L0.H3", "", ""]


def test_our_models_record_the_original_heads(tmp_path: Path) -> None:
    small = prune(MiniGPT(MiniGPTConfig(23, 8, 12, 4, n_layers=2)).eval(), {0: [1]})
    loaded = load(save(small, tmp_path / "small"))
    assert loaded.original_heads == {"L0": [0, 2, 3], "L1": [0, 1, 2, 3]}
    layer = prune(prune(MultiHeadAttention(12, 4), [(0, 1)]), [(0, 0)])
    assert layer.original_heads == {"L0": [2, 3]}


@pytest.mark.full
def test_results_keep_the_original_heads_in_files(tmp_path: Path) -> None:
    config = MiniGPTConfig(len(TOKENIZER.get_vocab()), n_layers=2, n_heads=4, d_model=16)
    small = prune(MiniGPT(replace(config, context=48)).eval(), GONE_FIRST)
    results: list[Any] = [
        _table(small), importance(small, [{"input_ids": IDS}]),
        find_roles(small, lines(8), tokenizer=TOKENIZER, evidence=Evidence(())),
    ]  # fmt: skip
    for result in results:
        for ending in ("csv", "json", "parquet"):
            loaded = type(result).load(result.save(tmp_path / f"{type(result).__name__}.{ending}"))
            assert loaded.frame().drop_duplicates("name")["original"].tolist() == LEFT
    assert (results[0] + results[0]).frame()["original"].tolist() == LEFT
    assert importance(zoo.make("Llama"), [{"input_ids": IDS}]).original == ()


def test_impossible_original_heads_are_refused(tmp_path: Path) -> None:
    folder = save(prune(zoo.make("Llama"), GONE_FIRST), tmp_path / "small")
    path = folder / "config.json"
    content = json.loads(path.read_text("utf-8"))
    for wrong in ([0, 0], [-1], ["0"], 3, [True]):
        content["original_heads"]["L1"] = wrong
        path.write_text(json.dumps(content), "utf-8")
        with pytest.raises(InputError, match=r"gives L1 the original heads .*Save the model again"):
            load(folder)
