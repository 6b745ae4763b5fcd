"""Attention on a GPU: every backend equals the definition, watching changes no bit.

Compiled code cannot be traced with the shape checks of annotations: it has a process of its own.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from children import run_laws
from headwise import masks, reference
from headwise.caching import CachePlan, LayerCachePlan
from headwise.kernels import attend
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE
from oracles import assert_tables_close, padded
from planted_pairs import sharp_t5
from strategies import Problem, problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
KINDS = {"plain": {}, "rope": {"rope": RoPE(8)}, "alibi": {"position_bias": ALiBi(4)}}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("backend", ["auto", "fused", "rows"])
@given(problem=problems(extras=False), grad=st.booleans())
def test_every_backend_equals_the_definition(backend: str, problem: Problem, grad: bool) -> None:
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in problem.how.items()}
    q, k, v = (x.cuda().requires_grad_(grad) for x in problem.qkv)
    ours = attend(q, k, v, **options, backend=backend, need_weights=True, need_lse=True)
    plain = attend(q, k, v, **options, backend=backend)
    theirs = reference.attention(
        *(x.detach().numpy() for x in problem.qkv),
        **problem.numpy(),
        need_weights=True,
        need_lse=True,
    )
    assert torch.equal(ours.heads, plain)
    for actual, expected in ((ours.heads, theirs.out), (ours.weights, theirs.weights),
                            (ours.lse, theirs.lse)):  # fmt: skip
        np.testing.assert_allclose(actual.detach().cpu().numpy(), expected, rtol=1e-9, atol=1e-12)


@each_half
@pytest.mark.parametrize("mask", [None, masks.window((70, 0)), masks.padding([300, 111])])
def test_half_precision_is_as_good_as_a_plain_implementation(
    dtype: torch.dtype, mask: masks.Mask | None
) -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").to(dtype) for _ in "qkv")
    exact = attend(q.double(), k.double(), v.double(), mask=mask, causal=True)
    hidden = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    if mask is not None:
        hidden = hidden | ~mask.dense(300, 300, q.device)
    plain = (q @ k.mT / 8).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    error = (attend(q, k, v, mask=mask, causal=True).double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max()


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_what_is_hidden_reaches_nothing(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, device="cuda", requires_grad=True) for _ in "qkv")
    expected = attend(q, k, v, causal=True, backend=backend)[:, :, :-1]
    with torch.no_grad():
        k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    output = attend(q, k, v, causal=True, backend=backend)[:, :, :-1]
    torch.testing.assert_close(output, expected)
    for gradient in torch.autograd.grad(output.sum(), (q, k, v)):
        assert gradient[:, :, :-1].isfinite().all()


@each_kind
def test_a_layer_agrees_with_the_cpu_and_decodes_in_pieces(kind: str) -> None:
    layer = MultiHeadAttention(32, 4, 2, **KINDS[kind]).double().requires_grad_(False)
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    expected = layer(x, causal=True)
    layer, x, cache = layer.cuda(), x.cuda(), KVCache()
    torch.testing.assert_close(layer(x, causal=True).cpu(), expected)
    read = [layer(part, causal=True, cache=cache) for part in x.split([5, 1, 7], dim=1)]
    torch.testing.assert_close(torch.cat(read, dim=1).cpu(), expected)


@each_kind
def test_watched_outputs_are_the_same_bits(kind: str) -> None:
    model = torch.nn.Sequential(MultiHeadAttention(32, 4, 2, **KINDS[kind])).cuda()
    x = torch.randn(2, 13, 32, device="cuda")
    plain = model(x)
    with hw.observe(model) as watch:
        assert torch.equal(model(x), plain)
    assert watch.table().heads


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[19] * 6, [3, 400, 3, 17]])
def test_calls_that_wait_on_a_gpu_count_as_on_a_cpu(lengths: list[int]) -> None:
    model, tables = llama(), []
    batches = [torch.randint(29, (2, n)) for n in lengths]
    for device in ("cpu", "cuda"):
        model.to(device)
        with hw.observe(model) as watch:
            for batch in batches:
                model(batch.to(device), use_cache=False)
        tables.append(watch.table())
    assert_tables_close(*tables, rtol=1e-4, atol=1e-6)


def test_a_compiled_layer_gives_the_same_output() -> None:
    run_laws(Path(__file__).with_name("attention_cuda_compiled.py"))


# A cache with a plan on a GPU gives what it gives on a CPU, whose laws are tested there.


PLAN = CachePlan((LayerCachePlan(0, (None, 5)), LayerCachePlan(1, (3, 5))), sinks=2)
FULL = CachePlan((LayerCachePlan(0, (None, None)), LayerCachePlan(1, (None, None))))
LENGTH = 19


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, vocab_size=29, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def texts(padding: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 29, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": real}


@torch.no_grad()
def in_pieces(model: nn.Module, pieces: list[int], padding: int) -> Tensor:
    batch, device = texts(padding), model.device
    logits, stop = [], 0
    with PLAN.cache(model) as cache:
        for piece in pieces:
            start, stop = stop, stop + piece
            output = model(
                input_ids=batch["input_ids"][:, start:stop].to(device),
                attention_mask=batch["attention_mask"][:, :stop].to(device),
                cache=cache,
            )
            logits.append(output.logits.cpu())
    return torch.cat(logits, 1)[batch["attention_mask"].bool()]


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("pieces", [[LENGTH], [8, 6, 5], [1] * LENGTH, [9, 1, 1, 1, 5, 1, 1]])
def test_it_equals_the_cpu(pieces: list[int], padding: int) -> None:
    expected = in_pieces(llama(), pieces, padding)
    actual = in_pieces(llama().cuda(), pieces, padding)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_all_heads_full_equals_the_stock_cache(how: dict[str, Any]) -> None:
    model = llama().cuda()
    batch = {name: x.cuda() for name, x in texts(4).items()}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | how
    stock = model.generate(**batch, **options)
    with FULL.cache(model) as cache:
        assert torch.equal(model.generate(**batch, **options, cache=cache), stock)


def test_memory_is_really_freed() -> None:
    model, ids = llama().cuda(), torch.randint(3, 29, (1, 4000)).cuda()
    with torch.no_grad(), PLAN.cache(model) as small, FULL.cache(model) as full:
        model(input_ids=ids, cache=small)
        model(input_ids=ids, cache=full)
    assert small.nbytes < 0.27 * full.nbytes


# Spans, task heads and alignments on a GPU are those on a CPU.


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
