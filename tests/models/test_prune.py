"""Pruning heads equals ablating them for every supported architecture."""

from copy import deepcopy
from typing import Any, Literal

import pytest
import torch
import transformers
import zoo
from torch import Tensor, nn

from headwise import MultiHeadAttention, Plan, ablate, prune
from headwise.errors import UnsupportedError
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import fingerprint
from headwise.models.ownership import (
    example_input,
    find_attentions,
    heads_of,
)
from oracles import padded

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
# Other heads in each layer; two of four, one of each group of two.
REMOVE = {0: [1, 3], 1: [0, 2]}

# Why these cannot be pruned.
BOUND = "Something outside the attention depends on which heads there are"
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


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "FalconMultiQuery", "Phi3", "GptOss"])
def test_layers_may_keep_different_numbers_of_heads(name: str) -> None:
    model = _model(name)
    gone = {0: [0, 1], 1: [1, 2, 3]}
    assert _gap(model, prune(model, gone), gone) <= 1e-12


@pytest.mark.parametrize("name", ["Llama", "Phi3", "GptOss", "Cohere"])
def test_uneven_groups_are_equalised_on_request(name: str) -> None:
    model = _model(name)
    gone = {0: [1], 1: [3]}
    with pytest.raises(UnsupportedError, match="would keep 1 of kv head 0, 2 of kv head 1"):
        prune(model, gone)
    small = prune(model, gone, expand=True)
    assert _gap(model, small, gone) <= 1e-12
    assert find_attentions(small)[0].site.n_kv_heads == 3


@pytest.mark.parametrize(
    "name", ["BloomForCausalLM", "FalconAlibi", "MPNetModel", "MptForCausalLM"]
)
def test_position_biases_are_pruned_with_their_heads(name: str) -> None:
    model = _model(name)
    gone = {0: [0, 1], 1: [1, 2, 3]}
    once = prune(model, gone)
    assert _gap(model, once, gone) <= 1e-12
    # The remaining heads are renumbered, and the model keeps their original numbers.
    assert _gap(model, prune(once, {0: [0]}), {0: [0, 1, 2], 1: [1, 2, 3]}) <= 1e-12


def test_layers_that_share_weights_lose_the_same_heads() -> None:
    model = _model("Albert")
    gone = [(0, 1), (1, 1)]
    assert _gap(model, prune(model, gone), gone) <= 1e-12


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "FalconMultiQuery", "GPTJForCausalLM"])
def test_a_folded_model_equals_the_mean_ablated_one(name: str) -> None:
    model = _model(name)
    reference = [_batch()]
    small = prune(model, REMOVE, fold="mean", reference=reference)
    assert _gap(model, small, REMOVE, mode="mean", reference=reference) <= 1e-12


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Falcon", "GPT2", "GptOss", "Llama", "Phi3", "Qwen3"])
def test_generation_is_equal_token_for_token(name: str, cache: str) -> None:
    if (name, cache) == ("Falcon", "static"):
        cache = "dynamic"
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


def test_a_pruned_model_can_be_pruned_again() -> None:
    model = _model("Llama")
    twice = prune(prune(model, {0: [0, 1]}), {0: [1], 1: [0, 1]})
    gone = {0: [0, 1, 3], 1: [0, 1]}
    assert _gap(model, twice, gone) <= 1e-12


_TEXT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"intermediate_size": 32}
_IMAGE = _TEXT | {"image_size": 16, "patch_size": 4}
_STACKS = {"vocab_size": 23, "d_model": 24, "pad_token_id": 0, "bos_token_id": 1}
_STACKS |= {"eos_token_id": 2, "decoder_start_token_id": 2}
for _side in ("encoder", "decoder"):
    _STACKS |= {f"{_side}_layers": 2, f"{_side}_attention_heads": 4, f"{_side}_ffn_dim": 32}
_T5 = {"vocab_size": 23, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4}
_CLIP = {
    "text_config": _TEXT | {"vocab_size": 23, "max_position_embeddings": 20, "projection_dim": 8},
    "vision_config": _IMAGE | {"projection_dim": 8},
    "projection_dim": 8,
}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 15, "max_target_positions": 20}
SEVERAL = {
    "BartForConditionalGeneration": _STACKS | {"max_position_embeddings": 20},
    "CLIPModel": _CLIP,
    "T5ForConditionalGeneration": _T5 | {"decoder_start_token_id": 0, "pad_token_id": 0},
    "ViTForImageClassification": _IMAGE,
    "WhisperForConditionalGeneration": _STACKS | _WHISPER,
}


@pytest.mark.parametrize("name", sorted(SEVERAL))
@torch.no_grad()
def test_stacks_and_towers_are_pruned(name: str) -> None:
    torch.manual_seed(1)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SEVERAL[name])).eval()
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
    torch.manual_seed(1)
    config = transformers.T5Config(**SEVERAL["T5ForConditionalGeneration"])
    model = transformers.T5ForConditionalGeneration(config).eval()
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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_t5_with_other_heads_in_each_layer_generates_the_same(cache: str) -> None:
    model = _t5()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"cache_implementation": cache}
    prompt = torch.tensor([TEXTS[0]])
    with ablate(model, T5_GONE):
        expected = model.generate(prompt, **options)
    assert torch.equal(prune(model, T5_GONE).generate(prompt, **options), expected)


OURS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "grouped": {"n_kv_heads": 2},
    "gated": {"gate": True, "bias": True},
    "normed": {"qk_norm": True, "v_head_dim": 5},
    "sinks": {"sinks": nn.Parameter(torch.tensor([0.1, 2.0, 1.0, 3.0], dtype=torch.float64))},
}


@pytest.mark.parametrize("name", sorted(OURS))
@torch.no_grad()
def test_our_layer_is_pruned(name: str) -> None:
    layer = MultiHeadAttention(12, 4, **OURS[name]).double()
    small = prune(layer, [(0, 0), (0, 3)])
    with ablate(layer, [(0, 0), (0, 3)]):
        expected = layer(X, causal=True)
    torch.testing.assert_close(small(X, causal=True), expected, rtol=0, atol=1e-12)
    assert (small.n_heads, small.n_kv_heads) == (2, 2)
    assert (layer.n_heads, small.q_proj.out_features) == (4, 2 * layer.head_dim)


@pytest.mark.parametrize("fold", [None, "mean"])
@torch.no_grad()
def test_mini_gpt_is_pruned(fold: Literal["mean"] | None) -> None:
    model = MiniGPT(MiniGPTConfig(13, 8, 12, 4, n_layers=2)).eval().double()
    ids = torch.tensor([[1, 5, 3], [7, 2, 2]])
    reference = [{"input_ids": ids}] if fold else None
    small = prune(model, REMOVE, fold=fold, reference=reference)
    with ablate(model, REMOVE, fold or "zero", reference):
        expected = model(ids)
    torch.testing.assert_close(small(ids), expected, rtol=0, atol=1e-12)


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
