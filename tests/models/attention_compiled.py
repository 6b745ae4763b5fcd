"""Hugging Face models on our kernel, compiled: run by `test_attention_uses`.

Dynamo cannot trace the shape checks of annotations, so these laws run in a process without them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import zoo
from torch import nn

from on_our_kernel import at_any_size as at_any_size
from on_our_kernel import left_to_torch as left_to_torch
from oracles import padded

pytestmark = pytest.mark.usefixtures("at_any_size", "_fresh")
BATCH: dict[str, Any] = dict(padded([[5, 9, 7, 3, 11, 8, 4], [4, 6, 13]], "right"))
REAL = BATCH["attention_mask"].bool()


@pytest.fixture
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _model(name: str) -> nn.Module:
    model = zoo.make(name)
    model.set_attn_implementation("headwise")
    return model


def _assert_alike(out: Any, plain: Any) -> None:
    torch.testing.assert_close(out[0][REAL], plain[0][REAL], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
@pytest.mark.parametrize(
    ("name", "backend"), [("Bert", "aot_eager"), ("Gemma2", "aot_eager"), ("Llama", "inductor")]
)
@torch.no_grad()
def test_in_one_graph(name: str, backend: str, left_to_torch: list[str]) -> None:
    model = _model(name)
    plain = model(**BATCH)
    graphs: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    _assert_alike(torch.compile(model, fullgraph=True, backend=compiler)(**BATCH), plain)
    assert len(graphs) == 1
    assert "headwise.attention" in graphs[0]
    assert not left_to_torch


def test_gradients_in_one_graph() -> None:
    gradients = []
    for compiled in (False, True):
        model = _model("Llama")
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        run(**BATCH, use_cache=False).logits[REAL].square().mean().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_compiled_layers_take_a_rule() -> None:
    model = _model("Llama")
    plain = model(**BATCH, use_cache=False)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    _assert_alike(model(**BATCH, use_cache=False), plain)


@torch.no_grad()
def test_a_static_cache_is_decoded_by_a_compiled_step() -> None:
    model = _model("Llama")
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**padded([[5, 9, 7], [4, 6, 13]], "left"), **how)
    forward = model.forward
    model.forward = torch.compile(forward, backend="aot_eager")
    ours = model.generate(
        **padded([[5, 9, 7], [4, 6, 13]], "left"), **how, cache_implementation="static"
    )
    assert torch.equal(ours, plain)
