"""Models that Accelerate spreads over devices: observed and scored as whole ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headwise as hw
from corpus_files import write_texts
from headwise.models import fingerprint

accelerate = pytest.importorskip("accelerate")
IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 2, 1, 8]])


def _llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=13,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(13)}, "0"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_an_offloaded_model_is_observed_and_scored(where: str, tmp_path: Path) -> None:
    whole, model = _llama(), _llama()
    # "cpu" stands for a device of its own here: weights are loaded for each call of a module.
    if where == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())
    assert fingerprint(model) == fingerprint(whole)
    tables = []
    for each in (whole, model):
        with hw.observe(each) as watch, torch.no_grad():
            each(input_ids=IDS)
        tables.append(watch.table())
    known, table = tables
    assert (table.heads, table.model) == (known.heads, known.model)
    for name in known.statistics:
        np.testing.assert_array_equal(table.count(name), known.count(name))
        np.testing.assert_array_equal(table.mean(name), known.mean(name))
    batches = [{"input_ids": IDS}]
    for method in ("half-gate", "ablation"):
        expected = hw.importance(whole, batches, method)
        scores = hw.importance(model, batches, method)
        np.testing.assert_allclose(scores.per_text, expected.per_text, rtol=1e-6, atol=1e-9)
        assert scores.model == expected.model
    data = write_texts(tmp_path / "texts.txt", ["5 9 7 3 11", "4 6 2 1 8", "1 2"])
    tables = []
    for name, each in (("whole", whole), ("parts", model)):
        job = hw.corpus(each, data, out=tmp_path / name, shards=2, tokenizer=_tokenizer())
        job.run()
        tables.append(job.merge())
    np.testing.assert_array_equal(tables[1].mean("entropy"), tables[0].mean("entropy"))
    assert tables[1].model == tables[0].model
