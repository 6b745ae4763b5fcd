"""The layer under precisions, autocast, vmap and torch.func gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap

from headwise.kernels import attend
from headwise.layer import ALiBi, KVCache, MultiHeadAttention, RoPE
from tiers import crossed, tiers

B, T, D_MODEL = 2, 29, 12
# Torch says itself that its kernel is called once for each member of a batch.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": RoPE(2), "bias": True},
    "normed": {"qk_norm": True, "gate": True},
    "alibi": {"position_bias": ALiBi(4)},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def _layer(kind: str) -> MultiHeadAttention:
    return MultiHeadAttention(D_MODEL, 4, 2, **KINDS[kind])


@pytest.mark.parametrize(("kind", "dtype"), crossed(KINDS, DTYPES))
def test_dtype_is_kept_and_gradients_are_finite(kind: str, dtype: torch.dtype) -> None:
    layer, x = _layer(kind).to(dtype), torch.randn(B, T, D_MODEL, dtype=dtype)
    out, weights = layer(x, causal=True, need_weights=True)
    assert out.dtype == dtype
    assert weights.sum(-1).le(1.01).all()
    layer(x, causal=True).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "half"), crossed(KINDS, DTYPES[:2]))
def test_autocast_computes_in_half_precision_with_float32_gradients(
    kind: str, half: torch.dtype
) -> None:
    layer, x = _layer(kind), torch.randn(B, T, D_MODEL)
    with torch.autocast("cpu", half):
        output = layer(x, causal=True)
        cached = layer(x, causal=True, cache=KVCache())
        mixed = layer(x.to(half), x)
    assert output.dtype == cached.dtype == mixed.dtype == half
    torch.testing.assert_close(output.float(), layer(x, causal=True), rtol=0.05, atol=0.05)
    output.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@each_kind
def test_meta_tensors_give_the_output_shapes(kind: str) -> None:
    layer, x = _layer(kind).to("meta"), torch.randn(B, T, D_MODEL, device="meta")
    with torch.no_grad():
        cached = layer(x, causal=True, cache=KVCache())
    assert cached.shape == layer(x, causal=True).shape == layer(x).shape == x.shape
    output = layer(x, causal=True, need_weights=True)
    assert output.weights.shape == (B, layer.n_heads, T, T)


@each_kind
def test_vmap_over_inputs_equals_single_calls(kind: str) -> None:
    layer, x = _layer(kind).double(), torch.randn(3, B, T, D_MODEL, dtype=torch.float64)
    mapped = vmap(lambda text: layer(text, causal=True))(x)
    torch.testing.assert_close(mapped, torch.stack([layer(text, causal=True) for text in x]))


@pytest.mark.parametrize(("kind", "name"), crossed(KINDS, PROJECTIONS))
def test_vmap_over_parameters_equals_single_layers(kind: str, name: str) -> None:
    layer, x = _layer(kind).double(), torch.randn(B, T, D_MODEL, dtype=torch.float64)
    stack = torch.randn(3, *layer.get_parameter(name).shape, dtype=torch.float64)

    def call_layer(weight: Tensor) -> Tensor:
        return functional_call(layer, {name: weight}, (x,), {"causal": True})

    with torch.no_grad():
        torch.testing.assert_close(
            vmap(call_layer)(stack), torch.stack([call_layer(x) for x in stack])
        )


@pytest.mark.parametrize("extras", [{}, {"need_lse": True}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "sinks"])
@pytest.mark.parametrize("T", [T, 256])  # the longer text uses the native kernel
def test_vmap_works_over_each_tensor_of_attend(name: str, extras: dict[str, Any], T: int) -> None:
    inputs = {part: torch.randn(B, 4, T, 32) for part in "qkv"}
    inputs |= {"mask": torch.randn(B, 1, T, T) > -1, "bias": torch.randn(4, T, T)[None]}
    inputs |= {"sinks": torch.randn(4)} if name == "sinks" else {}
    stack = torch.stack([inputs[name], inputs[name].roll(1, -1)])

    def attend_with(x: Tensor) -> tuple[Tensor, ...]:
        output = attend(**inputs | {name: x}, causal=True, **extras)
        return (output,) if isinstance(output, Tensor) else (output.heads, output.lse)

    each = [attend_with(x) for x in stack]
    for ours, *theirs in zip(vmap(attend_with)(stack), *each, strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


@each_kind
@pytest.mark.parametrize("training", tiers([True], [False]))
def test_fake_tensors_give_the_output_shapes(kind: str, training: bool) -> None:
    with FakeTensorMode(), torch.set_grad_enabled(training):
        out, weights = _layer(kind)(torch.randn(B, 300, D_MODEL), causal=True, need_weights=True)
        assert _layer(kind)(torch.randn(B, 300, D_MODEL), causal=True).shape == out.shape
    assert (out.shape, weights.shape) == ((B, 300, D_MODEL), (B, 4, 300, 300))


@pytest.mark.parametrize("kind", ["plain", "rope", "normed"])
def test_gradients_per_text_equal_single_gradients(kind: str) -> None:
    layer, x = _layer(kind).double(), torch.randn(B, T, D_MODEL, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, nn.Parameter], text: Tensor) -> Tensor:
        return functional_call(layer, parameters, text[None], {"causal": True}).square().sum()

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for row in range(B):
        single = torch.autograd.grad(loss(parameters, x[row]), list(parameters.values()))
        for name, expected in zip(parameters, single, strict=True):
            torch.testing.assert_close(gradients[name][row], expected)


def test_the_jacobian_equals_that_of_autograd() -> None:
    layer, x = _layer("rope").double(), torch.randn(1, 3, D_MODEL, dtype=torch.float64)
    actual = jacrev(lambda text: layer(text, causal=True))(x)
    expected = torch.autograd.functional.jacobian(lambda text: layer(text, causal=True), x)
    torch.testing.assert_close(actual, expected)
