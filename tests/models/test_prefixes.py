"""A text behind a prefix that its mask does not cover: every token keeps its position."""

import inspect
from itertools import product
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn

from headwise.watch import Request, observe
from oracles import OF_WEIGHTS, assert_of_weights, padded
from tiers import crossed

PREFIX = 4
TEXTS = [[5, 9, 7, 3, 11, 8, 4, 2, 6, 13], [4, 6, 12], [10, 3, 3, 12, 9, 7]]


class SoftPrefix(nn.Module):
    """Learned vectors before the embeddings of a text, known only to the inner model."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.prefix = nn.Parameter(torch.randn(PREFIX, width))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        embeddings = self.model.get_input_embeddings()(input_ids)
        prefix = self.prefix.expand(len(input_ids), -1, -1)
        mask = _behind(PREFIX, attention_mask)
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        embeddings = torch.cat([prefix, embeddings], 1)
        return self.model(inputs_embeds=embeddings, attention_mask=mask, **options)


def _eager_maps(model: nn.Module, batch: dict[str, Tensor], real: Tensor) -> Any:
    """For each layer and text the weights that the model itself gives between real tokens.

    Keys of a cache come before the queries: rows of zeros stand for their own queries.
    """
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    cached = out.attentions[0].shape[3] - out.attentions[0].shape[2]
    layers = [F.pad(weights, (0, 0, cached, 0)) for weights in out.attentions]
    return [
        [w[:, r][:, :, r].double().numpy() for w, r in zip(layer, real.bool(), strict=True)]
        for layer in layers
    ]


def _check(model: nn.Module, inner: nn.Module, batch: dict[str, Tensor], real: Tensor) -> None:
    """Statistics of `model` are those of the eager weights of the model within it.

    Args:
        real: Which columns of the sequence that the model within reads are not padding.
    """
    with torch.no_grad():
        plain = model(**batch)[0]
        with observe(model, Request()) as watch:
            watched = model(**batch)[0]
    assert torch.equal(plain, watched)
    zoo.use_eager(inner)
    assert_of_weights(watch.table(), _eager_maps(model, batch, real))


def _behind(prefix: int, mask: Tensor) -> Tensor:
    return torch.cat([mask.new_ones(len(mask), prefix), mask], 1)


# Embeddings of I-BERT are pairs: numbers, and the scale of their integers.
WITH_EMBEDDINGS = zoo.each(without=["IBertModel"])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", WITH_EMBEDDINGS)
def test_a_soft_prefix_is_part_of_the_text(name: str, side: str) -> None:
    model = zoo.make(name)
    width = model.get_input_embeddings().weight.shape[1]
    batch = padded(TEXTS, side)
    batch.pop("position_ids", None)
    wrapped = SoftPrefix(model, width).eval()
    _check(wrapped, model, batch, _behind(PREFIX, batch["attention_mask"]))


@pytest.mark.parametrize("name", WITH_EMBEDDINGS)
def test_embeddings_beyond_the_mask_are_placed_where_the_model_attends_to_them(name: str) -> None:
    """Some models treat tokens beyond a mask as padding, some as text; others refuse them."""
    model = zoo.make(name)
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 9, 7, 3, 11, 8, 4]]))
    batch = {"inputs_embeds": embeddings, "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    try:
        with torch.no_grad():
            model(**batch)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return
    zoo.use_eager(model)  # fused kernels leave some masks out
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[-1]
    _check(model, model, batch, (weights > 0).any(2).any(1))


IN_PEFT = pytest.mark.filterwarnings(
    "ignore:`(is_gradient_checkpointing`|past_key_values` is deprecated):FutureWarning"
)
PROMPTS = {
    "prompt": lambda **options: peft.PromptTuningConfig(**options),
    "p-tuning": lambda **options: peft.PromptEncoderConfig(**options, encoder_hidden_size=8),
    "prefix": lambda **options: peft.PrefixTuningConfig(**options, encoder_hidden_size=8),
}


def _prompted(kind: str, name: str) -> tuple[nn.Module, nn.Module]:
    model = zoo.make(name)
    causal = name.endswith("LM") or name in ("GPT2", "Llama", "Qwen2", "OPT")
    config = PROMPTS[kind](
        task_type="CAUSAL_LM" if causal else "FEATURE_EXTRACTION", num_virtual_tokens=PREFIX
    )
    return peft.get_peft_model(model, config).eval(), model


ADAPTERS = [*product(["prompt", "p-tuning"], ["Bert", "GPT2", "Llama", "OPT", "Roberta"])]
ADAPTERS += product(["prefix"], ["GPT2", "Llama", "OPT", "Qwen2"])


@IN_PEFT
@pytest.mark.parametrize(("adapter", "side"), crossed(ADAPTERS, ["right", "left"]))
def test_virtual_tokens_of_adapters_are_part_of_the_text(
    adapter: tuple[str, str], side: str
) -> None:
    kind, name = adapter
    model, inner = _prompted(kind, name)
    batch = padded(TEXTS, side)
    batch.pop("position_ids", None)
    _check(model, inner, batch, _behind(PREFIX, batch["attention_mask"]))


def test_a_decision_transformer_reads_three_tokens_a_step() -> None:
    torch.manual_seed(0)
    model = transformers.DecisionTransformerModel(
        transformers.DecisionTransformerConfig(
            state_dim=3, act_dim=2, hidden_size=24, n_layer=2, n_head=zoo.HEADS, max_ep_len=20
        )
    ).eval()  # fmt: skip
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    batch = {
        "states": torch.randn(2, 5, 3),
        "actions": torch.randn(2, 5, 2),
        "rewards": torch.randn(2, 5, 1),
        "returns_to_go": torch.randn(2, 5, 1),
        "timesteps": torch.arange(5).expand(2, 5),
        "attention_mask": mask,
    }
    _check(model, model.encoder, batch, mask.repeat_interleave(3, 1))


def test_an_image_before_the_text_is_part_of_it() -> None:
    torch.manual_seed(0)
    image = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    image |= {"intermediate_size": 32, "image_size": 8, "patch_size": 4}
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": zoo.HEADS}
    sizes |= {"intermediate_size": 32, "vocab_size": 23, "max_position_embeddings": 40}
    model = transformers.GitForCausalLM(transformers.GitConfig(vision_config=image, **sizes)).eval()
    batch = padded(TEXTS, "right")
    batch["pixel_values"] = torch.randn(len(TEXTS), 3, 8, 8)
    _check(model, model, batch, _behind(5, batch["attention_mask"]))


@IN_PEFT
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # in peft
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_decoding_behind_virtual_tokens_counts_what_one_pass_counts(kind: str) -> None:
    """The model within continues the cache: peft 0.21 does not know `generate`'s name of it."""
    model, inner = _prompted(kind, "Llama")
    ids = torch.tensor([[5, 9, 7, 3, 11, 8]])
    mask = torch.ones(1, PREFIX + ids.shape[1], dtype=torch.long)
    with torch.no_grad(), observe(model) as watch:
        cache = model(ids[:, :3], attention_mask=mask[:, PREFIX:][:, :3], use_cache=True).cache
        for n in range(3, ids.shape[1]):
            inner(ids[:, n : n + 1], attention_mask=mask[:, : PREFIX + n + 1], cache=cache)
    with torch.no_grad(), observe(model) as known:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    for name in OF_WEIGHTS:
        ours, theirs = watch.table(), known.table()
        np.testing.assert_array_equal(ours.count(name), theirs.count(name), err_msg=name)
        np.testing.assert_allclose(ours.mean(name), theirs.mean(name), atol=1e-5, err_msg=name)
