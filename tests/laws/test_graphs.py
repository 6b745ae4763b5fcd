"""Compiled models are watched in their graphs; most laws run in a process without shape checks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import headwise as hw
from children import run_laws
from oracles import assert_tables_close


@pytest.mark.full
def test_the_laws_of_graphs_hold() -> None:
    run_laws(Path(__file__).with_name("graphs_followed.py"))


@pytest.mark.parametrize("name", ["begin_pass", "observe", "answer"])
def test_graphs_of_cuda_leave_the_operators_out(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.headwise, name).default.tags


class Attention(nn.Module):
    """One that the compiler is quick to trace."""

    num_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(2, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_a_compiled_function_is_watched_in_its_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 5, 8)
    with hw.observe(model) as watch:
        for _ in range(3):
            model(x)
    step = torch.compile(lambda x: model(x).sum(), fullgraph=True, backend=backend)
    unwatched = step(x)
    assert not [name for name in operators if "headwise" in name]
    for _ in range(2):
        with hw.observe(model) as compiled:
            assert torch.equal([step(x) for _ in range(3)][-1], unwatched)
        assert_tables_close(compiled.table(), watch.table())
    assert operators.count("headwise.begin_pass") == 1  # in a graph for both watches
    assert operators.count("headwise.observe") == 2
    assert not counters["graph_break"]
