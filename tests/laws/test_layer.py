"""Every layer equals the definition, whatever its sizes, masks and inputs."""

import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise import masks
from headwise.layer import ALiBi, MultiHeadAttention, RoPE
from oracles_layer import by_definition, close
from strategies import seeds, sizes

B, T, S, D_MODEL, KDIM, VDIM = 2, 5, 7, 12, 11, 13


@dataclass(frozen=True)
class Call:
    """A layer in float64, its inputs, and its keyword arguments."""

    layer: MultiHeadAttention
    inputs: tuple[Tensor, ...]
    how: dict[str, Any]


@st.composite
def options(draw: st.DrawFn, n_heads: int) -> dict[str, Any]:
    """Optional constructor arguments; each is omitted more often than not."""
    head_dim = draw(st.integers(2, 5))
    ropes = st.builds(RoPE, width=st.sampled_from([2, head_dim // 2 * 2]))
    choices = {
        "bias": st.sampled_from([True, "qkv"]),
        "v_head_dim": sizes,
        "qk_norm": st.just(True),
        "gate": st.just(True),
        "rope": ropes,
        "position_bias": st.just(ALiBi(n_heads)),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(choices)), max_size=4))
    return {"head_dim": head_dim} | {name: draw(choices[name]) for name in sorted(chosen)}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Self- and cross-attention, grouped heads, any widths, masks and causality, every option."""
    B, n_kv_heads, G, d_model, kdim, vdim = (draw(sizes) for _ in range(6))
    T, n_inputs = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3]))
    S = T if n_inputs == 1 else draw(st.integers(1, 6))
    rng = torch.Generator().manual_seed(draw(seeds))
    widths = {"kdim": kdim, "vdim": vdim if n_inputs == 3 else kdim} if n_inputs > 1 else {}
    H = n_kv_heads * G
    layer = MultiHeadAttention(d_model, H, n_kv_heads, **draw(options(H)), **widths)
    shapes = ((B, T, d_model), (B, S, kdim), (B, S, vdim))[:n_inputs]
    inputs = tuple(torch.randn(*s, generator=rng, dtype=torch.float64) for s in shapes)
    arguments: dict[str, Any] = {}
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(T, S), (B, 1, 1, S), (B, 1, T, S), (B, H, T, S)]))
        visible = torch.rand(*shape, generator=rng) < draw(st.sampled_from([0.2, 0.8]))
        additive = torch.randn(*shape, generator=rng, dtype=torch.float64)
        additive = additive.masked_fill(~visible, -torch.inf)
        arguments["mask"] = draw(st.sampled_from([visible, additive]))
    if draw(st.booleans()):
        arguments["causal"] = True
    return Call(layer.double(), inputs, arguments)


@given(call=calls())
def test_a_layer_equals_the_definition(call: Call) -> None:
    out, weights = call.layer(*call.inputs, **call.how, need_weights=True)
    expected, expected_weights = by_definition(call.layer, *call.inputs, **call.how)
    close(out, expected)
    close(weights, expected_weights)


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (masks.causal(), torch.ones(T, T).tril().bool()),
        (masks.window((1, 2)), torch.ones(T, T).tril(2).triu(-1).bool()),
        (~masks.causal(), torch.ones(T, T).triu(1).bool()),
        (masks.padding([3, 5]), torch.arange(T) < torch.tensor([3, 5])[:, None, None, None]),
        (
            masks.causal() & masks.documents(torch.tensor([[0, 0, 1, 1, 1]] * B)),
            torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).tril().bool(),
        ),
        (masks.from_blocked(torch.ones(T, T).triu(1).bool()), torch.ones(T, T).tril().bool()),
    ],
    ids=["causal", "window", "not", "padding", "documents", "blocked"],
)
def test_a_lazy_mask_equals_its_dense_mask(mask: masks.Mask, visible: Tensor) -> None:
    layer = MultiHeadAttention(D_MODEL, 3).double()
    x = torch.randn(B, T, D_MODEL, dtype=torch.float64)
    close(layer(x, mask=mask), by_definition(layer, x, mask=visible)[0])


@pytest.mark.parametrize("bias", [True, False])
def test_a_query_without_keys_adds_zeros_before_the_output_projection(bias: bool) -> None:
    layer = MultiHeadAttention(D_MODEL, 3, bias=bias)
    x = torch.randn(B, T, D_MODEL, requires_grad=True)
    mask = torch.ones(B, 1, T, T, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    out = layer(x, mask=mask)
    nothing = layer.out_proj.bias if bias else torch.zeros(D_MODEL)
    assert torch.equal(out[0, 2], nothing)
    assert torch.equal(out[1], nothing.expand(T, -1))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in [x, *layer.parameters()])
    assert not x.grad[1].any()


def test_dropout_is_active_in_training_only() -> None:
    layer = MultiHeadAttention(D_MODEL, 3, dropout=0.5)
    x = torch.randn(B, T, D_MODEL)
    trained = layer(x)
    assert not torch.equal(trained, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    certain = MultiHeadAttention(D_MODEL, 3)
    certain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), certain(x))


def _copied(layer: MultiHeadAttention) -> MultiHeadAttention:
    return copy.deepcopy(layer)


def _pickled(layer: MultiHeadAttention) -> MultiHeadAttention:
    return pickle.loads(pickle.dumps(layer))


def _reloaded(layer: MultiHeadAttention) -> MultiHeadAttention:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = MultiHeadAttention(D_MODEL, 4, 2, kdim=KDIM, vdim=VDIM, bias=True)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@pytest.mark.parametrize("remade", [_copied, _pickled, _reloaded])
def test_a_copied_layer_gives_the_same_bits(remade: Any) -> None:
    layer = MultiHeadAttention(D_MODEL, 4, 2, kdim=KDIM, vdim=VDIM, bias=True)
    inputs = torch.randn(B, T, D_MODEL), torch.randn(B, S, KDIM), torch.randn(B, S, VDIM)
    before = layer(*inputs)
    copied = remade(layer)
    assert torch.equal(before, copied(*inputs))
    torch.nn.init.zeros_(copied.out_proj.weight)
    assert torch.equal(before, layer(*inputs))  # no tensor is shared


def test_gradient_checkpointing_changes_no_gradient() -> None:
    layer = MultiHeadAttention(D_MODEL, 3, bias=True)
    x = torch.randn(B, T, D_MODEL, requires_grad=True)
    inputs = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x, causal=True).square().sum(), inputs)
    again = checkpoint(layer, x, causal=True, use_reentrant=False)
    for before, after in zip(plain, torch.autograd.grad(again.square().sum(), inputs), strict=True):
        assert torch.equal(before, after)


@given(call=calls())
def test_gradients_equal_finite_differences(call: Call) -> None:
    inputs = [x.clone().requires_grad_() for x in call.inputs]
    assert torch.autograd.gradcheck(lambda *x: call.layer(*x, **call.how), inputs, fast_mode=True)


def test_the_repr_of_a_layer_lists_its_arguments() -> None:
    layer = MultiHeadAttention(D_MODEL, 4, 2, rope=RoPE(2), position_bias=ALiBi(4))
    text = repr(layer)
    assert "d_model=12, n_heads=4, n_kv_heads=2, head_dim=3, v_head_dim=3, rope=RoPE(" in text
    assert "HeadAttention(dropout=0.0)" in text
