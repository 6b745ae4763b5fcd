"""The statements of docs/mathematics.md for layers of any size; its figures are tested there."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor

from headwise.counts import layer_sizes
from headwise.layer import MultiHeadAttention

sizes = st.integers(1, 4)


class Attended(NamedTuple):
    """A layer, its input, and the outputs and weights of its heads."""

    layer: MultiHeadAttention
    x: Tensor
    out: Tensor
    weights: Tensor
    values: Tensor
    heads: Tensor


@st.composite
def attended(draw: st.DrawFn, *, out_proj: bool = True) -> Attended:
    n_heads, head_dim, T = draw(sizes), draw(sizes), draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    d_model = n_heads * head_dim
    layer = MultiHeadAttention(d_model, n_heads, out_proj=out_proj).double()
    x = torch.randn(1, T, d_model, dtype=torch.float64)
    out, weights = layer(x, need_weights=True)
    values = layer.v_proj(x).reshape(T, n_heads, head_dim).transpose(0, 1)
    return Attended(layer, x[0], out[0], weights[0], values, weights[0] @ values)


@given(attended())
def test_the_output_is_the_sum_over_heads(run: Attended):
    H, _, D = run.heads.shape
    W_O = run.layer.out_proj.weight.T.reshape(H, D, -1)
    torch.testing.assert_close(run.out, (run.heads @ W_O).sum(dim=0))


def in_hull(point: np.ndarray, corners: np.ndarray) -> bool:
    """Whether the point is a convex combination of the corners."""
    rows, goal = np.vstack([corners.T, np.ones(len(corners))]), np.append(point, 1)
    return linprog(np.zeros(len(corners)), A_eq=rows, b_eq=goal, bounds=(0, None)).success


@given(attended())
def test_a_head_lies_in_the_convex_hull_of_its_values(run: Attended):
    for values, heads in zip(run.values.detach().numpy(), run.heads.detach().numpy(), strict=True):
        assert all(in_hull(head, values) for head in heads)
        longest = values[np.linalg.norm(values, axis=1).argmax()]
        assert not in_hull(1.5 * longest, values)


@given(attended())
def test_the_rank_of_a_bilinear_form_is_at_most_the_head_width(run: Attended):
    H, _, D = run.heads.shape
    W_Q, W_K = (
        module.weight.T.reshape(-1, H, D).transpose(0, 1)
        for module in (run.layer.q_proj, run.layer.k_proj)
    )
    forms = W_Q @ W_K.mT
    assert forms.shape == (H, H * D, H * D)
    assert (torch.linalg.matrix_rank(forms) <= D).all()
    logits = run.x @ forms @ run.x.T / D**0.5
    torch.testing.assert_close(logits.softmax(dim=-1), run.weights)


@given(attended(out_proj=False), st.data())
def test_without_W_O_no_head_reaches_another(run: Attended, data: st.DataObject):
    H, _, D = run.heads.shape
    torch.testing.assert_close(run.out, run.heads.transpose(0, 1).flatten(1))
    head = data.draw(st.integers(0, H - 1))
    of_head = torch.arange(H).repeat_interleave(D) == head
    with torch.no_grad():
        for module in (run.layer.q_proj, run.layer.k_proj, run.layer.v_proj):
            module.weight[of_head] += 1
    moved = (run.layer(run.x[None])[0] != run.out).any(dim=0)
    assert torch.equal(moved, of_head)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("T", [1, 7, 24])
def test_costs_do_not_depend_on_the_number_of_heads(n_heads: int, T: int):
    d = 12
    work = layer_sizes(d, n_heads).multiply_adds(T)
    assert sum(work[role] for role in "QKVO") == 4 * T * d**2
    assert work["logits"] + work["mix"] == 2 * T**2 * d
    assert (work["logits"] + work["mix"] > sum(work[role] for role in "QKVO")) == (2 * d < T)
