"""Spans, task heads and alignments on a GPU are those on a CPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
from oracles import padded
from planted_pairs import sharp_t5

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
TEXTS = [[5, 9, 7, 3, 11, 4, 6, 8, 2, 13, 12], [8, 10, 3, 3, 12, 9, 5]]


def _llama() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=40,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("queries", [None, "last", [(6, 9), [(4, 5), (6, 7)]]])
def test_spans(side: str, queries: Any) -> None:
    request = hw.Request(spans=("doc",), top=("doc",), per_text=True, per_query=True)
    tables, masses = [], []
    for device in ("cpu", "cuda"):
        model = _llama().to(device)
        batch = {name: x.to(device) for name, x in padded(TEXTS, side).items()}
        with torch.no_grad(), hw.observe(model, request) as watch:
            watch.spans(doc=[(2, 5), [(0, 1), (3, 5)]], queries=queries)
            model(**batch)
        tables.append(watch.table())
        masses.append(watch.per_query("doc", "L1.H2"))
    for name in ("doc", "top(doc)"):
        np.testing.assert_array_equal(tables[0].count(name), tables[1].count(name))
        np.testing.assert_allclose(tables[0].mean(name), tables[1].mean(name), atol=1e-5)
    for known, ours in zip(*masses, strict=True):
        torch.testing.assert_close(ours.cpu(), known, atol=1e-5, rtol=0, equal_nan=True)


def test_task_heads() -> None:
    rng = np.random.default_rng(0)
    examples = [
        hw.Example(rng.integers(2, 40, 12).tolist(), (11, 12), (1, 3), [(3, 5), (5, 8)], answer=[7])
        for _ in range(64)
    ]
    model = _llama()
    known, ours = (
        hw.find_heads(copy.deepcopy(model).to(device), examples, evidence=hw.Evidence(nulls=()))
        for device in ("cpu", "cuda")
    )
    assert ours.heads == known.heads
    np.testing.assert_allclose(ours.frame()["contrast"], known.frame()["contrast"], atol=1e-5)
    assert ours.answers is not None
    assert known.answers is not None
    assert ours.answers.loss == pytest.approx(known.answers.loss, abs=1e-4)


def test_alignments() -> None:
    outputs = [[6, 2, 7], [12, 13, 9, 9, 1]]
    batch = {name: padded(TEXTS, "right")[name] for name in ("input_ids", "attention_mask")}
    spans = []
    for device in ("cpu", "cuda"):
        model = sharp_t5().to(device)
        spans.append([a.spans for a in hw.align(model, batch, outputs, heads=[(0, 1), (1, 3)])])
    for known, ours in zip(*spans, strict=True):
        np.testing.assert_array_equal(ours, known)
