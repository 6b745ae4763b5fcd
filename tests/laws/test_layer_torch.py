"""Conversion from torch's layer keeps every number, name and mode."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from children import run_laws
from headwise.errors import ArgumentError, ShapeError
from headwise.layer import ALiBi, MultiHeadAttention, RoPE
from headwise.masks.tiles import Tile
from oracles_layer import close, position_bias, rotated

B, T, S, D_MODEL = 2, 5, 7, 12

options = st.fixed_dictionaries(
    {
        "num_heads": st.sampled_from([1, 3, 4]),
        "bias": st.booleans(),
        "kdim": st.sampled_from([None, 11]),
        "vdim": st.sampled_from([None, 13]),
        "batch_first": st.booleans(),
    }
)


def _theirs(**options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(D_MODEL, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _inputs(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    widths = (T, D_MODEL), (S, module.kdim), (S, module.vdim)
    return tuple(torch.randn(B, *shape, dtype=torch.float64) for shape in widths)


def _run(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], **options: Any
) -> tuple[Any, Any]:
    """Call torch's layer batch first."""
    if module.batch_first:
        out, weights = module(*inputs, average_attn_weights=False, **options)
    else:
        turned = (x.transpose(0, 1) for x in inputs)
        out, weights = module(*turned, average_attn_weights=False, **options)
        out = out.transpose(0, 1)
    return out, weights


@given(config=options)
def test_a_layer_converted_from_torch_gives_the_same_output(config: dict[str, Any]) -> None:
    theirs = _theirs(**config)
    inputs = _inputs(theirs)
    out, weights = _run(theirs, inputs)
    output = MultiHeadAttention.from_torch(theirs)(*inputs, need_weights=True)
    torch.testing.assert_close(output.out, out)
    torch.testing.assert_close(output.weights, weights)


def test_masks_of_torch_are_the_inverse_of_ours() -> None:
    theirs = _theirs(num_heads=3)
    inputs = _inputs(theirs)
    blocked = torch.rand(T, S) < 0.3
    padding = torch.arange(S) >= torch.tensor([[S], [4]])
    out, _ = _run(theirs, inputs, attn_mask=blocked, key_padding_mask=padding)
    visible = ~(blocked | padding[:, None, None])  # B 1 T S
    torch.testing.assert_close(MultiHeadAttention.from_torch(theirs)(*inputs, mask=visible), out)


def test_dtype_mode_and_dropout_are_converted() -> None:
    theirs = nn.MultiheadAttention(D_MODEL, 3, dropout=0.25, dtype=torch.bfloat16).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.attention.dropout, ours.training) == (0.25, False)
    assert ours.q_proj.weight.dtype == torch.bfloat16


@given(config=options, frozen=st.sets(st.integers(0, 5)))
def test_frozen_parameters_stay_frozen(config: dict[str, Any], frozen: set[int]) -> None:
    theirs = _theirs(**config)
    for index, parameter in enumerate(theirs.parameters()):
        parameter.requires_grad_(index not in frozen)
    ours = MultiHeadAttention.from_torch(theirs)
    packed = theirs.in_proj_weight
    for role in "qkv":
        source = getattr(theirs, f"{role}_proj_weight") if packed is None else packed
        assert getattr(ours, f"{role}_proj").weight.requires_grad == source.requires_grad
    assert ours.out_proj.weight.requires_grad == theirs.out_proj.weight.requires_grad


class _Named(MultiHeadAttention):
    """A subclass with the arguments of its base."""

    def __init__(self, *args: Any, name: str = "mine", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


@given(config=options)
def test_a_subclass_makes_layers_of_its_own_class(config: dict[str, Any]) -> None:
    theirs = _theirs(**config)
    layer = _Named.from_torch(theirs)
    assert type(layer) is _Named
    assert layer.name == "mine"
    base = MultiHeadAttention.from_torch(theirs)
    assert type(base) is MultiHeadAttention
    inputs = _inputs(theirs)
    assert torch.equal(layer(*inputs), base(*inputs))


def test_pruning_keeps_the_subclass() -> None:
    layer = _Named(D_MODEL, 4, name="kept")
    layer.q_proj.eval()
    small = hw.prune(layer, [(0, 1)])
    assert type(small) is _Named
    assert small.name == "kept"
    modes = {name: module.training for name, module in layer.named_modules()}
    assert {name: module.training for name, module in small.named_modules()} == modes


# Weights of textbook layers give our layer their output, whatever they are called.


TEXTBOOK_WIDTH, N_HEADS, TEXTBOOK_TOKENS = 15, 3, 7
CAUSAL = torch.ones(TEXTBOOK_TOKENS, TEXTBOOK_TOKENS, dtype=torch.bool).tril()


class TextbookLayer(nn.Module):
    """Multi-head attention as courses write it, with projections of any names."""

    def __init__(self, names: str, bias: bool) -> None:
        super().__init__()
        self.names = names.split()
        for name in self.names:
            self.add_module(name, nn.Linear(TEXTBOOK_WIDTH, TEXTBOOK_WIDTH, bias=bias))
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(self.get_submodule(name)(x)) for name in self.names[:3])
        logits = q @ k.mT / math.sqrt(TEXTBOOK_WIDTH // N_HEADS)
        heads = logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v
        return self.get_submodule(self.names[3])(heads.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (N_HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "blocks.0.attn."])
@pytest.mark.parametrize(
    "names",
    [
        "W_q W_k W_v W_o", "W_Q W_K W_V W_O", "wq wk wv wo", "q_proj k_proj v_proj out_proj",
        "W_query W_key W_value out_proj", "query key value proj", "to_q to_k to_v to_out",
        "q_linear k_linear v_linear out", "fc_q fc_k fc_v fc_o", "queries keys values fc",
    ],
)  # fmt: skip
def test_linear_layers_load_by_any_name(names: str, prefix: str, bias: bool) -> None:
    torch.manual_seed(0)
    theirs = TextbookLayer(names, bias)
    state = {prefix + name: tensor for name, tensor in theirs.state_dict().items()}
    ours = hw.MultiHeadAttention.from_state_dict(state, N_HEADS)
    x = torch.randn(2, TEXTBOOK_TOKENS, TEXTBOOK_WIDTH)
    torch.testing.assert_close(ours(x, causal=True), theirs(x))
    assert (ours.q_proj.bias is not None) == bias


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("biases", ["", "QKV", "QKVO", "QV"])
def test_bare_parameters_are_used_as_x_at_w(per_head: bool, biases: str) -> None:
    reference = hw.reference.MultiHeadAttention(TEXTBOOK_WIDTH, N_HEADS, seed=3)
    state = {f"W_{role}": getattr(reference, f"W_{role}") for role in "QKVO"}
    rng = np.random.default_rng(0)
    added = {role: rng.standard_normal(TEXTBOOK_WIDTH).astype(np.float32) for role in biases}
    x = rng.standard_normal((2, TEXTBOOK_TOKENS, TEXTBOOK_WIDTH)).astype(np.float32)
    q, k, v = (
        (x @ state[f"W_{role}"] + added.get(role, 0))
        .reshape(2, TEXTBOOK_TOKENS, N_HEADS, reference.d_head)
        .swapaxes(1, 2)
        for role in "QKV"
    )
    heads = hw.reference.attention(q, k, v).swapaxes(1, 2).reshape(x.shape)
    expected = heads @ state["W_O"] + added.get("O", 0)
    if per_head:  # heads, in, width; of the output heads, width, out
        split = {
            name: W.reshape(TEXTBOOK_WIDTH, N_HEADS, -1).swapaxes(0, 1) for name, W in state.items()
        }
        state = split | {"W_O": state["W_O"].reshape(N_HEADS, -1, TEXTBOOK_WIDTH)}
        added = {role: b if role == "O" else b.reshape(N_HEADS, -1) for role, b in added.items()}
    state |= {f"b_{role}": b for role, b in added.items()}
    layer = hw.MultiHeadAttention.from_state_dict(state, N_HEADS)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, atol=2e-5)


def test_the_reference_layer_is_called_with_an_additive_mask() -> None:
    layer = hw.reference.MultiHeadAttention(TEXTBOOK_WIDTH, N_HEADS)
    x = np.random.default_rng(0).standard_normal((TEXTBOOK_TOKENS, TEXTBOOK_WIDTH))
    additive = np.where(CAUSAL.numpy(), 0.0, -np.inf)
    np.testing.assert_array_equal(layer(x, additive), layer.forward(x, CAUSAL.numpy()))
    assert layer.d_head == TEXTBOOK_WIDTH // N_HEADS


def test_grouped_heads_follow_from_the_shapes() -> None:
    theirs = hw.MultiHeadAttention(TEXTBOOK_WIDTH, N_HEADS, 1, head_dim=7, v_head_dim=2)
    state = {name.replace("_proj", ""): x for name, x in theirs.state_dict().items()}
    ours = hw.MultiHeadAttention.from_state_dict(state, N_HEADS)
    x = torch.randn(2, TEXTBOOK_TOKENS, TEXTBOOK_WIDTH)
    assert torch.equal(ours(x), theirs(x))
    assert (ours.n_kv_heads, ours.head_dim, ours.v_head_dim) == (1, 7, 2)


W = torch.zeros(6, 6)
STATE = {f"W_{role}": W for role in "qkvo"}


@pytest.mark.parametrize(
    ("state", "options", "error", "message"),
    [
        (STATE | {"W_z": W}, {}, ArgumentError, "W_z is not a weight or bias"),
        (STATE | {"wq": W}, {}, ArgumentError, "wq gives the weight of 'q' for the second time"),
        ({"W_q": W}, {}, ArgumentError, r"no weights of k, v, out among \['W_q'\]"),
        ({}, {}, ArgumentError, r"no weights of q, k, v, out among \[\]"),
        (STATE | {"W_q": "text"}, {}, ArgumentError, "W_q is of type str"),
        (STATE | {"W_q": torch.zeros(6)}, {}, ShapeError, r"W_q has the shape \(6,\)"),
        (STATE | {"W_k": torch.zeros(6, 5)}, {}, ShapeError, "n_heads=3 .* 6, 5 and 6"),
        (STATE, {"bias": True}, ArgumentError, "bias=True follows from the tensors: False"),
    ],
)  # fmt: skip
def test_what_does_not_load_is_named(state, options, error, message) -> None:
    with pytest.raises(error, match=f"^from_state_dict: .*{message}"):
        hw.MultiHeadAttention.from_state_dict(state, 3, **options)


# Laws of positions: rotation keeps norms and encodes distances, as biases do.


ropes = st.builds(RoPE, width=st.sampled_from([2, 4, 10]), base=st.sampled_from([100.0, 10_000.0]))


def _rotated(rope: RoPE, x: Tensor, *positions: int) -> Tensor:
    return rope.rotate(x, rope.cos_sin(torch.tensor(positions), x.dtype))


@given(rope=ropes)
def test_rotation_is_a_product_of_complex_numbers(rope: RoPE) -> None:
    x, positions = torch.randn(2, 3, 5, 11, dtype=torch.float64), (0, 1, 2, 70, -3)
    close(_rotated(rope, x, *positions), rotated(rope, x.numpy(), np.array(positions)))


@given(rope=ropes, shift=st.integers(-50, 1000))
def test_only_the_distance_matters(rope: RoPE, shift: int) -> None:
    q, k = torch.randn(2, 1, 1, 1, 11, dtype=torch.float64)
    near = (_rotated(rope, q, 7) * _rotated(rope, k, 3)).sum()
    far = (_rotated(rope, q, 7 + shift) * _rotated(rope, k, 3 + shift)).sum()
    torch.testing.assert_close(near, far)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rotates_as_exactly_as_a_plain_implementation(dtype: torch.dtype) -> None:
    rope, positions = RoPE(64), range(500)
    x = torch.randn(1, 2, 500, 64, dtype=torch.float64).to(dtype)
    exact = _rotated(rope, x.double(), *positions)
    angles = torch.arange(500)[:, None] * rope.base ** -(torch.arange(0, 64, 2) / 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.chunk(2, -1)
    plain = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    error = (_rotated(rope, x, *positions).double() - exact).abs()
    worst = (plain.double() - exact).abs()
    assert error.max() <= 2 * worst.max()
    assert error.mean() <= worst.mean()


@pytest.mark.parametrize(("T", "S"), [(5, 5), (5, 7), (7, 5), (1, 7), (0, 5), (5, 0)])
@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12])
def test_alibi_is_a_slope_times_the_distance(n_heads: int, T: int, S: int) -> None:
    part = ALiBi(n_heads)
    bias, whole = part.bias(torch.float64), position_bias(part, T, S)
    close(bias.tile(Tile.whole(T, S)), whole)
    if T > 2 and S > 3:
        tile = Tile(T, S, range(1, T - 1), range(2, S), torch.device("cpu"))
        close(bias.tile(tile), whole[:, :, 1 : T - 1, 2:])


def test_alibi_slopes_equal_those_of_the_paper() -> None:
    assert ALiBi(8).slopes() == tuple(2.0**-n for n in range(1, 9))
    assert ALiBi(12).slopes()[8:] == tuple(2.0**-n for n in (0.5, 1.5, 2.5, 3.5))


@pytest.mark.full
@pytest.mark.parametrize("name", ["layer_compiled", "attend_traced"])
def test_the_layer_and_attend_can_be_compiled_exported_and_transformed(name: str) -> None:
    run_laws(Path(__file__).with_name(f"{name}.py"))
