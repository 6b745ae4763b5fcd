"""`attend` compiled, exported and transformed; run by `test_layer_torch`.

Dynamo cannot trace the shape checks of annotations, so these laws run in a process without them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import masks
from headwise._native_library import library
from headwise.kernels import attend
from headwise.layer import ALiBi, MultiHeadAttention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LOWER = torch.ones(7, 7).tril().bool()
ADDITIVE = torch.zeros(7, 7).masked_fill(~LOWER, -torch.inf)
RULES = {
    "plain": {},
    "causal": {"causal": True},
    "boolean": {"mask": LOWER},
    "additive": {"mask": ADDITIVE},
    "bias": {"bias": torch.linspace(-1, 1, 49).reshape(7, 7), "causal": True},
    "window": {"window": (3, 0)},
    "padding": {"mask": masks.padding(torch.tensor([5, 7])) & masks.causal()},
    "rows": {"causal": True, "softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
}
rules = pytest.mark.parametrize("rule", RULES)


native = pytest.mark.skipif(not library(), reason=f"no native kernel: {library().why}")
backends = pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=native)])


class _Module(nn.Module):
    def __init__(self, rule: str, **more: Any) -> None:
        super().__init__()
        self.how = RULES[rule] | more

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, **self.how)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)


@pytest.mark.parametrize(
    ("rule", "backend"),
    [
        *((rule, "auto") for rule in RULES),
        # The native kernel has no gradients of a bias.
        *(pytest.param(rule, "native", marks=native) for rule in RULES if rule != "bias"),
    ],
)
def test_attend_compiles_into_one_graph(rule: str, backend: str) -> None:
    torch.compiler.reset()
    model, inputs = _Module(rule, backend=backend), [x.requires_grad_() for x in _inputs()]
    expected = _Module(rule)(*inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), inputs) for x in (compiled, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rule", ["plain", "boolean"])
def test_attend_compiles_with_dynamic_sizes(rule: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(_Module(rule), fullgraph=True, backend="aot_eager", dynamic=True)
    for inputs in (_inputs(), [_inputs()[0]] * 3):  # with and without shared keys
        torch.testing.assert_close(compiled(*inputs), _Module(rule)(*inputs))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("plain", "sinks")])
def test_hidden_keys_change_nothing_when_compiled(rule: str) -> None:
    torch.compiler.reset()
    q, k, v = _inputs()
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    compiled = torch.compile(_Module(rule), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), _Module(rule)(q, k, v), equal_nan=True)


@rules
@backends
@pytest.mark.parametrize("strict", [True, False])
def test_attend_exports(rule: str, backend: str, strict: bool) -> None:
    model, inputs = _Module(rule, backend=backend), _inputs()
    exported = torch.export.export(model, inputs, strict=strict)
    assert (_operators(exported.graph_module) == {"headwise.attention"}) == (backend == "native")
    torch.testing.assert_close(exported.module()(*inputs), model(*inputs))


@rules
def test_torch_func_grad_works(rule: str) -> None:
    q, k, v = _inputs()
    actual = torch.func.grad(lambda q: _Module(rule)(q, k, v).square().sum())(q)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(_Module(rule)(q, k, v).square().sum(), q)
    torch.testing.assert_close(actual, expected)


@rules
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's kernel
def test_vmap_works(rule: str) -> None:
    inputs = [torch.stack([x, -x]) for x in _inputs()]
    mapped = torch.func.vmap(_Module(rule))(*inputs)
    expected = torch.stack([_Module(rule)(*(x[index] for x in inputs)) for index in (0, 1)])
    torch.testing.assert_close(mapped, expected)


class _Graphs(list[set[str]]):
    """A compiler that runs graphs as they are, and records the operators of each."""

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.append(_operators(graph))
        return graph.forward


def _operators(graph: torch.fx.GraphModule) -> set[str]:
    """The calls of our operators and of torch's kernel in a graph."""
    names = {str(node.target) for node in graph.graph.nodes}
    return {n for n in ("headwise.attention", "scaled_dot") if any(n in name for name in names)}


@native
@rules
def test_the_native_kernel_is_one_operator_of_the_graph(rule: str) -> None:
    torch.compiler.reset()
    graphs, model, inputs = _Graphs(), _Module(rule, backend="native"), _inputs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert graphs == [{"headwise.attention"}]


@native
def test_torch_func_compiles_with_the_kernel_of_pytorch() -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(1, 4, 300, 32) for _ in range(3))  # long enough for the native kernel
    gradient = torch.func.grad(lambda q: _Module("plain")(q, k, v).square().sum())
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), gradient(q))


@native
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}, {"softcap": 2.0}])
def test_an_export_with_dynamic_sizes_takes_any_size(options: dict[str, Any]) -> None:
    model = _Module("causal", backend="native", **options)
    texts, length = torch.export.Dim("B"), torch.export.Dim("T", min=5)
    open_sizes = ({0: texts, 2: length},) * 3
    exported = torch.export.export(model, _inputs(), dynamic_shapes=open_sizes)
    assert _operators(exported.graph_module) == {"headwise.attention"}
    for n in (5, 300):
        q, k, v = torch.randn(3, 4, n, 8), torch.randn(3, 2, n, 8), torch.randn(3, 2, n, 5)
        torch.testing.assert_close(exported.module()(q, k, v), model(q, k, v))


@native
@torch.no_grad()
def test_the_native_kernel_is_chosen_alike_when_compiled() -> None:
    torch.compiler.reset()
    graphs = _Graphs()
    compiled = torch.compile(_Module("causal"), fullgraph=True, backend=graphs)
    chosen = []
    for n_tokens in (500, 600, 700, 16, 20, 30, 800):
        q, k, v = (torch.randn(1, 12, n_tokens, 64) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), _Module("causal")(q, k, v))
        chosen.append(graphs[-1])
    long, short = {"headwise.attention"}, {"scaled_dot"}
    assert chosen == [long, long, long, short, short, short, short]
    assert len(graphs) == 3  # for 500, many and few tokens


@native
@torch.no_grad()
def test_an_exported_program_runs_without_the_native_kernel() -> None:
    inputs = tuple(torch.randn(1, 12, 500, 64) for _ in range(3))
    exported = torch.export.export(_Module("causal"), inputs)
    assert _operators(exported.graph_module) == {"scaled_dot"}


@native
@torch.no_grad()
def test_a_bias_by_distance_stays_a_table_when_compiled() -> None:
    torch.compiler.reset()
    graphs = _Graphs()
    layer = MultiHeadAttention(512, 8, position_bias=ALiBi(8)).eval()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for n_tokens in (500, 600):
        x = torch.randn(1, n_tokens, 512)
        torch.testing.assert_close(compiled(x, causal=True), layer(x, causal=True))
    assert graphs == [{"headwise.attention"}] * 2


@native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_traces_the_native_kernel() -> None:
    model, inputs = _Module("plain", backend="native"), _inputs()
    traced = torch.jit.trace(model, inputs, check_trace=False)
    fresh = _inputs()
    torch.testing.assert_close(traced(*fresh), model(*fresh))
