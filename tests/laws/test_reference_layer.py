"""The seeded layer of the definition: its initialisation, and the equality of all its forms."""

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwise import reference
from headwise.reference import (
    MultiHeadAttention,
    multi_head_batched,
    multi_head_loop,
    scaled_dot_product,
    single_head,
)


def test_matrices_follow_the_recipe():
    layer = MultiHeadAttention(6, 3, seed=5)
    rng = np.random.default_rng(5)
    for matrix in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O):
        drawn = rng.standard_normal((6, 6)).astype(np.float32) * np.float32(1 / np.sqrt(6))
        assert matrix.dtype == np.float32
        np.testing.assert_array_equal(matrix, drawn)


def test_the_seed_defaults_to_zero_and_heads_do_not_change_the_matrices():
    first, second = MultiHeadAttention(6, 3), MultiHeadAttention(6, 2, seed=0)
    np.testing.assert_array_equal(first.W_O, second.W_O)
    np.testing.assert_array_equal(single_head(6).W_O, second.W_O)
    assert not np.array_equal(first.W_O, MultiHeadAttention(6, 3, seed=1).W_O)


class LayerProblem(NamedTuple):
    layer: MultiHeadAttention
    x: np.ndarray
    memory: np.ndarray | None
    mask: np.ndarray | None


@st.composite
def layer_problems(draw: st.DrawFn) -> LayerProblem:
    n_heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    T, S = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layer = MultiHeadAttention(n_heads * head_dim, n_heads, seed=draw(st.integers(0, 9)))
    memory = draw(st.booleans())
    keys = S if memory else T
    shape = draw(st.sampled_from([None, (T, keys), (*batch, n_heads, T, keys)]))
    mask = None if shape is None else rng.random(shape) < 0.6
    if mask is not None and draw(st.booleans()):
        mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf)
    return LayerProblem(
        layer.astype(np.float64),
        rng.standard_normal((*batch, T, n_heads * head_dim)),
        rng.standard_normal((*batch, S, n_heads * head_dim)) if memory else None,
        mask,
    )


@given(layer_problems())
def test_the_loop_over_heads_equals_the_batched_expression(problem: LayerProblem):
    layer, x, memory, mask = problem
    loop, batched = (
        implementation(layer, x, mask, memory)
        for implementation in (multi_head_loop, multi_head_batched)
    )
    for actual, expected in zip(loop, batched, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@given(layer_problems())
def test_the_layer_is_project_attend_join_and_mix(problem: LayerProblem):
    layer, x, memory, mask = problem
    keys = x if memory is None else memory

    def by_head(rows: np.ndarray) -> np.ndarray:
        rows = rows if rows.ndim == 3 else rows[None]
        return np.stack(np.split(rows, layer.n_heads, axis=-1), axis=1)

    if mask is not None and mask.ndim == 3:
        mask = mask[None]
    q, k, v = by_head(x @ layer.W_Q), by_head(keys @ layer.W_K), by_head(keys @ layer.W_V)
    attended = reference.attention(q, k, v, mask=mask, need_weights=True)
    out, weights = layer.forward(x, problem.mask, memory=memory, need_weights=True)
    joined = np.concatenate(list(attended.out.swapaxes(0, 1)), axis=-1).reshape(x.shape)
    np.testing.assert_allclose(out, joined @ layer.W_O, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        weights, attended.weights.reshape(weights.shape), rtol=1e-12, atol=1e-12
    )
    assert weights.shape == (*x.shape[:-2], layer.n_heads, x.shape[-2], keys.shape[-2])
    np.testing.assert_array_equal(layer.forward(x, problem.mask, memory=memory), out)


def test_one_head_of_full_width_is_eq_1_between_projections():
    layer = single_head(6, seed=2)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    mixed, _ = scaled_dot_product(x @ layer.W_Q, x @ layer.W_K, x @ layer.W_V)
    np.testing.assert_allclose(layer.forward(x), mixed @ layer.W_O, rtol=1e-6, atol=1e-6)
    # One head of full width needs no `W_O`: three matrices compute the same.
    merged = single_head(6, seed=2, out_proj=False)
    assert merged.W_O is None
    assert merged.astype(np.float64).W_V.dtype == np.float64
    for forward in (multi_head_batched, multi_head_loop):
        np.testing.assert_allclose(forward(merged, x)[0], layer.forward(x), rtol=1e-5, atol=1e-6)


def test_float32_stays_float32_whatever_the_mask():
    layer = MultiHeadAttention(6, 3)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    out, weights = layer.forward(x, np.zeros((5, 5)), need_weights=True)
    assert (out.dtype, weights.dtype) == (np.float32, np.float32)
    exact = layer.astype(np.float64).forward(x)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(out, exact, atol=1e-5)
