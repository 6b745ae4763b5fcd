"""The layer compiled, exported, and written as ONNX; run by `test_layer_torch`.

Dynamo cannot trace the shape checks of annotations, so these laws run in a process without them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from headwise import masks
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE

B, T, D_MODEL = 2, 7, 12
MAKE: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bias": lambda: {"bias": True, "dropout": 0.0},
    "rope": lambda: {"rope": RoPE(2)},
    "normed": lambda: {"qk_norm": True, "gate": True, "v_head_dim": 5},
    "alibi": lambda: {"position_bias": ALiBi(4)},
}
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "dense": {"mask": torch.rand(B, 4, T, T) < 0.6},
    "window": {"mask": masks.window((2, 0))},
    "lazy": {"mask": masks.causal() & masks.padding(torch.tensor([T, 4]))},
    "additive": {"mask": torch.randn(T, T)},
    "weights": {"need_weights": True},
}


# Every kind, and every call.
CASES = [(kind, "causal") for kind in MAKE] + [("plain", call) for call in CALLS]
each_case = pytest.mark.parametrize(("kind", "call"), CASES)


class Called(nn.Module):
    """A layer with fixed call arguments, for exporters that accept only tensors."""

    def __init__(self, kind: str, call: str) -> None:
        super().__init__()
        self.layer, self.how = MultiHeadAttention(D_MODEL, 4, 2, **MAKE[kind]()), CALLS[call]

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, **self.how)


@each_case
def test_a_layer_compiled_without_graph_breaks_gives_the_same_output(kind: str, call: str) -> None:
    torch._dynamo.reset()
    model = Called(kind, call)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, T, D_MODEL, requires_grad=True)
    for actual, expected in zip(_all_of(compiled, x), _all_of(model, x), strict=True):
        torch.testing.assert_close(actual, expected)


def _all_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and gradients."""
    out = model(x)
    outs = list(out) if isinstance(out, tuple) else [out]
    leaves = [x, *model.parameters()]
    return outs + list(torch.autograd.grad(outs[0].square().sum(), leaves))


@pytest.mark.parametrize("kind", ["plain", "rope", "alibi"])
def test_a_compiled_layer_takes_texts_of_any_length(kind: str) -> None:
    torch._dynamo.reset()
    model = Called(kind, "causal")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n_tokens in (7, 11, 13):
        x = torch.randn(B, n_tokens, D_MODEL)
        torch.testing.assert_close(compiled(x), model(x))


def test_decoding_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    layer = MultiHeadAttention(D_MODEL, 4, 2, rope=RoPE(2)).requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, cache = torch.randn(B, T, D_MODEL), KVCache()
    layer(x[:, :4], cache=cache, causal=True)
    outputs = [compiled(token, cache=cache) for token in x[:, 4:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x, causal=True)[:, 4:])


@each_case
def test_an_exported_layer_takes_any_length_that_its_mask_has(kind: str, call: str) -> None:
    model, of_any = Called(kind, call).eval(), "mask" not in CALLS[call]
    open_sizes = ({0: torch.export.Dim("B"), 1: torch.export.Dim("T")},) if of_any else None
    x = torch.randn(B, T, D_MODEL)
    exported = torch.export.export(model, (x,), dynamic_shapes=open_sizes).module()
    for n_texts, n_tokens in ((B, T), (3, 40), (1, 300)) if of_any else ((B, T),):
        x = torch.randn(n_texts, n_tokens, D_MODEL)
        torch.testing.assert_close(exported(x), model(x))


class _MaskFromInput(nn.Module):
    """A layer whose lazy mask is made from an input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(D_MODEL, 4)
        self.make = {"padding": masks.padding, "documents": masks.documents}[kind]

    def forward(self, x: Tensor, content: Tensor) -> Tensor:
        return self.layer(x, mask=self.make(content) & masks.causal())


@pytest.mark.parametrize("kind", ["padding", "documents"])
def test_a_mask_made_from_an_input_keeps_the_batch_dynamic(kind: str) -> None:
    def mask_argument(n_texts: int, n_tokens: int) -> Tensor:
        return torch.randint(1, 3, (n_texts, n_tokens) if kind == "documents" else (n_texts,))

    model, batch, length = _MaskFromInput(kind).eval(), torch.export.Dim("B"), torch.export.Dim("T")
    inputs = torch.randn(B, T, D_MODEL), mask_argument(B, T)
    open_sizes = ({0: batch, 1: length}, dict(enumerate((batch, length)[: inputs[1].ndim])))
    exported = torch.export.export(model, inputs, dynamic_shapes=open_sizes).module()
    for n_texts, n_tokens in ((B, T), (3, 40), (5, 300)):
        inputs = torch.randn(n_texts, n_tokens, D_MODEL), mask_argument(n_texts, n_tokens)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["plain", "rope", "normed"])
def test_onnx_gives_the_same_output(kind: str) -> None:
    model, x = Called(kind, "causal").eval(), torch.randn(B, T, D_MODEL)
    onnx = ReferenceEvaluator(
        torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
    )
    (output,) = onnx.run(None, {onnx.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.as_tensor(output), model(x).detach())
