"""Weights of textbook layers give our layer their output, whatever they are called."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, ShapeError

D_MODEL, N_HEADS, T = 15, 3, 7
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


class TextbookLayer(nn.Module):
    """Multi-head attention as courses write it, with projections of any names."""

    def __init__(self, names: str, bias: bool) -> None:
        super().__init__()
        self.names = names.split()
        for name in self.names:
            self.add_module(name, nn.Linear(D_MODEL, D_MODEL, bias=bias))
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(self.get_submodule(name)(x)) for name in self.names[:3])
        logits = q @ k.mT / math.sqrt(D_MODEL // N_HEADS)
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
    x = torch.randn(2, T, D_MODEL)
    torch.testing.assert_close(ours(x, causal=True), theirs(x))
    assert (ours.q_proj.bias is not None) == bias


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("biases", ["", "QKV", "QKVO", "QV"])
def test_bare_parameters_are_used_as_x_at_w(per_head: bool, biases: str) -> None:
    reference = hw.reference.MultiHeadAttention(D_MODEL, N_HEADS, seed=3)
    state = {f"W_{role}": getattr(reference, f"W_{role}") for role in "QKVO"}
    rng = np.random.default_rng(0)
    added = {role: rng.standard_normal(D_MODEL).astype(np.float32) for role in biases}
    x = rng.standard_normal((2, T, D_MODEL)).astype(np.float32)
    q, k, v = (
        (x @ state[f"W_{role}"] + added.get(role, 0))
        .reshape(2, T, N_HEADS, reference.d_head)
        .swapaxes(1, 2)
        for role in "QKV"
    )
    heads = hw.reference.attention(q, k, v).swapaxes(1, 2).reshape(x.shape)
    expected = heads @ state["W_O"] + added.get("O", 0)
    if per_head:  # heads, in, width; of the output heads, width, out
        split = {name: W.reshape(D_MODEL, N_HEADS, -1).swapaxes(0, 1) for name, W in state.items()}
        state = split | {"W_O": state["W_O"].reshape(N_HEADS, -1, D_MODEL)}
        added = {role: b if role == "O" else b.reshape(N_HEADS, -1) for role, b in added.items()}
    state |= {f"b_{role}": b for role, b in added.items()}
    layer = hw.MultiHeadAttention.from_state_dict(state, N_HEADS)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), expected, atol=2e-5)


def test_the_reference_layer_is_called_with_an_additive_mask() -> None:
    layer = hw.reference.MultiHeadAttention(D_MODEL, N_HEADS)
    x = np.random.default_rng(0).standard_normal((T, D_MODEL))
    additive = np.where(CAUSAL.numpy(), 0.0, -np.inf)
    np.testing.assert_array_equal(layer(x, additive), layer.forward(x, CAUSAL.numpy()))
    assert layer.d_head == D_MODEL // N_HEADS


def test_grouped_heads_and_a_missing_output_follow_from_the_shapes() -> None:
    theirs = hw.MultiHeadAttention(D_MODEL, N_HEADS, 1, head_dim=7, v_head_dim=2, out_proj=False)
    state = {name.replace("_proj", ""): x for name, x in theirs.state_dict().items()}
    ours = hw.MultiHeadAttention.from_state_dict(state, N_HEADS)
    x = torch.randn(2, T, D_MODEL)
    assert torch.equal(ours(x), theirs(x))
    assert (ours.n_kv_heads, ours.head_dim, ours.v_head_dim) == (1, 7, 2)


W = torch.zeros(6, 6)
STATE = {f"W_{role}": W for role in "qkvo"}


@pytest.mark.parametrize(
    ("state", "options", "error", "message"),
    [
        (STATE | {"W_z": W}, {}, ArgumentError, "W_z is not a weight or bias"),
        (STATE | {"wq": W}, {}, ArgumentError, "wq gives the weight of 'q' for the second time"),
        ({"W_q": W}, {}, ArgumentError, r"no weights of k, v among \['W_q'\]"),
        ({}, {}, ArgumentError, r"no weights of q, k, v among \[\]"),
        (STATE | {"W_q": "text"}, {}, ArgumentError, "W_q is of type str"),
        (STATE | {"W_q": torch.zeros(6)}, {}, ShapeError, r"W_q has the shape \(6,\)"),
        (STATE | {"W_k": torch.zeros(6, 5)}, {}, ShapeError, "n_heads=3 .* 6, 5 and 6"),
        (STATE, {"bias": True}, ArgumentError, "bias=True follows from the tensors: False"),
    ],
)  # fmt: skip
def test_what_does_not_load_is_named(state, options, error, message) -> None:
    with pytest.raises(error, match=f"^from_state_dict: .*{message}"):
        hw.MultiHeadAttention.from_state_dict(state, 3, **options)


def test_load_state_dict_names_the_way_in_for_textbook_names() -> None:
    state = {f"W_{role}.weight": torch.zeros(6, 6) for role in "qkvo"}
    with pytest.raises(ArgumentError, match=r"unknown \['W_k.*from_state_dict\(state, n_heads\)"):
        hw.MultiHeadAttention(6, 2).load_state_dict(state)
