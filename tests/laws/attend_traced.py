"""`attend` compiled, exported and transformed: run by `test_attend_traced`.

Dynamo cannot trace the shape checks of annotations, so these laws run in a process without them.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import masks
from headwise.kernels import attend

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


class _Module(nn.Module):
    def __init__(self, rule: str) -> None:
        super().__init__()
        self.how = RULES[rule]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, **self.how)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)


@rules
def test_it_compiles_into_one_graph(rule: str) -> None:
    torch.compiler.reset()
    inputs = [x.requires_grad_() for x in _inputs()]
    expected = _Module(rule)(*inputs)
    compiled = torch.compile(_Module(rule), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), inputs) for x in (compiled, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("plain", "sinks")])
def test_compiled_too_what_is_hidden_reaches_nothing(rule: str) -> None:
    torch.compiler.reset()
    q, k, v = _inputs()
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf
    compiled = torch.compile(_Module(rule), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), _Module(rule)(q, k, v), equal_nan=True)


@rules
@pytest.mark.parametrize("strict", [True, False])
def test_it_exports(rule: str, strict: bool) -> None:
    inputs = _inputs()
    exported = torch.export.export(_Module(rule), inputs, strict=strict).module()
    torch.testing.assert_close(exported(*inputs), _Module(rule)(*inputs))


@rules
def test_it_differentiates_as_a_function(rule: str) -> None:
    q, k, v = _inputs()
    found = torch.func.grad(lambda q: _Module(rule)(q, k, v).square().sum())(q)
    q.requires_grad_()
    (expected,) = torch.autograd.grad(_Module(rule)(q, k, v).square().sum(), q)
    torch.testing.assert_close(found, expected)


@rules
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's kernel
def test_it_maps_over_one_more_axis(rule: str) -> None:
    inputs = [torch.stack([x, -x]) for x in _inputs()]
    mapped = torch.func.vmap(_Module(rule))(*inputs)
    expected = torch.stack([_Module(rule)(*(x[at] for x in inputs)) for at in (0, 1)])
    torch.testing.assert_close(mapped, expected)
