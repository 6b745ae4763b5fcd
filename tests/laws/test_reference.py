"""The definition compared with its laws and with three nested loops in plain Python."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise import reference
from headwise.reference import AttentionOutput, scaled_dot_product


class AttentionInputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray
    """`[B, H, T, S]`, with many rows that see no key."""


@st.composite
def problems(draw: st.DrawFn) -> AttentionInputs:
    B, Hkv, G = (draw(st.integers(1, 3)) for _ in range(3))
    T, S, D, Dv = (draw(st.integers(1, 5)) for _ in range(4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    visible = rng.random((B, Hkv * G, T, S)) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    return AttentionInputs(
        rng.standard_normal((B, Hkv * G, T, D)),
        rng.standard_normal((B, Hkv, S, D)),
        rng.standard_normal((B, Hkv, S, Dv)),
        visible,
    )


def full(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> AttentionOutput:
    return reference.attention(q, k, v, need_weights=True, need_lse=True, **options)


def assert_same(first: AttentionOutput, second: AttentionOutput) -> None:
    for actual, expected in zip(first, second, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_three_nested_loops_give_the_same_output():
    rng = np.random.default_rng(0)
    B, H, Hkv, T, S, D, Dv = 2, 6, 3, 5, 7, 11, 13
    q = rng.standard_normal((B, H, T, D))
    k = rng.standard_normal((B, Hkv, S, D))
    v = rng.standard_normal((B, Hkv, S, Dv))
    out = full(q, k, v, causal=True, softcap=1.7, scale=0.9, sinks=np.linspace(-1, 1, H))
    for b, h, t in np.ndindex(B, H, T):
        sink = -1 + 2 * h / (H - 1)
        exps = []
        for s in range(t + S - T + 1):
            dot = sum(q[b, h, t, d] * k[b, h // 2, s, d] for d in range(D))
            exps.append(math.exp(1.7 * math.tanh(0.9 * dot / 1.7)))
        total = sum(exps) + math.exp(sink)
        assert out.lse[b, h, t] == pytest.approx(math.log(total), rel=1e-13)
        for d in range(Dv):
            mixed = sum(e * v[b, h // 2, s, d] for s, e in enumerate(exps)) / total
            assert out.out[b, h, t, d] == pytest.approx(mixed, rel=1e-11, abs=1e-13)


@given(problems())
def test_the_definition_equals_the_printed_formula(problem: AttentionInputs):
    q, k, v, visible = problem
    groups = q.shape[1] // k.shape[1]
    k, v = (array.repeat(groups, axis=1) for array in (k, v))
    out, weights = scaled_dot_product(q, k, v, visible)
    ours = full(q, k, v, mask=visible)
    np.testing.assert_allclose(ours.out, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours.weights, weights, rtol=1e-12, atol=1e-12)


@given(problems())
def test_grouped_heads_are_heads_that_read_repeated_keys(problem: AttentionInputs):
    q, k, v, visible = problem
    groups = q.shape[1] // k.shape[1]
    repeated = full(q, k.repeat(groups, axis=1), v.repeat(groups, axis=1), mask=visible)
    assert_same(full(q, k, v, mask=visible), repeated)


@given(problems())
def test_weights_are_shares_and_rows_without_keys_are_zeros(problem: AttentionInputs):
    q, k, v, visible = problem
    out, weights, lse = full(q, k, v, mask=visible)
    sees = visible.any(axis=-1)
    np.testing.assert_allclose(weights.sum(axis=-1), sees, rtol=1e-12)
    assert (weights >= 0).all()
    assert (weights[~visible] == 0).all()
    assert (out[~sees] == 0).all()
    assert (lse[~sees] == -np.inf).all()
    assert np.isfinite(lse[sees]).all()


@given(problems())
def test_weights_follow_from_the_logits_and_lse(problem: AttentionInputs):
    q, k, v, visible = problem
    _, weights, lse = full(q, k, v, mask=visible, scale=0.8)
    logits = 0.8 * q @ k.repeat(q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2)
    rows, allowed = visible.any(axis=-1), visible
    expected = np.where(
        allowed, np.exp(np.where(allowed, logits, 0) - np.where(rows, lse, 0)[..., None]), 0
    )
    np.testing.assert_allclose(weights, expected, rtol=1e-11, atol=1e-13)


@given(problems(), st.sampled_from([np.float16, np.float32, np.float64]), st.booleans())
def test_additive_masks_equal_boolean_ones(problem: AttentionInputs, kind: type, endless: bool):
    q, k, v, visible = problem
    never = -np.inf if endless else np.finfo(kind).min
    additive = np.where(visible, 0.0, never).astype(kind)
    assert_same(full(q, k, v, mask=additive), full(q, k, v, mask=visible))
    assert_same(full(q, k, v, bias=additive), full(q, k, v, mask=visible))


@given(problems(), st.randoms())
def test_a_float_mask_and_a_bias_are_added_to_the_logits(problem: AttentionInputs, random):
    q, k, v, visible = problem
    bias = np.array([random.uniform(-2, 2) for _ in range(visible.size)]).reshape(visible.shape)
    combined = full(q, k, v, mask=visible, bias=bias)
    assert_same(combined, full(q, k, v, mask=np.where(visible, bias, -np.inf)))
    groups = q.shape[1] // k.shape[1]
    logits = q @ k.repeat(groups, axis=1).swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + bias
    exps = np.exp(np.where(visible, logits, -np.inf)).sum(axis=-1)
    np.testing.assert_allclose(np.exp(combined.lse), exps, rtol=1e-12)


def test_a_mask_and_a_bias_of_few_digits_are_added_in_full():
    q = np.zeros((1, 1, 1, 1))
    mask, bias = np.full((1, 1), 1000, np.float16), np.full((1, 1), 0.125, np.float16)
    assert full(q, q, q, mask=mask, bias=bias).lse.item() == 1000.125


@given(problems())
def test_causal_is_the_triangle_that_ends_at_the_last_key(problem: AttentionInputs):
    q, k, v, _ = problem
    T, S = q.shape[2], k.shape[2]
    triangle = np.tril(np.ones((T, S), dtype=bool), S - T)
    assert_same(full(q, k, v, causal=True), full(q, k, v, mask=triangle))
    assert_same(full(q, k, v, causal=True), full(q, k, v, window=(None, 0)))


@given(problems(), *[st.none() | st.integers(0, 4)] * 2)
def test_a_window_is_a_band(problem: AttentionInputs, left: int | None, right: int | None):
    q, k, v, visible = problem
    T, S = q.shape[2], k.shape[2]
    band = np.zeros((T, S), dtype=bool)
    for i, j in np.ndindex(T, S):
        ahead = j - (i + S - T)
        band[i, j] = (left is None or ahead >= -left) and (right is None or ahead <= right)
    assert_same(
        full(q, k, v, mask=visible, window=(left, right)), full(q, k, v, mask=visible & band)
    )
    assert_same(
        full(q, k, v, causal=True, window=(left, right)), full(q, k, v, mask=np.tril(band, S - T))
    )


@given(problems())
def test_masked_keys_never_change_the_output(problem: AttentionInputs):
    q, k, v, visible = problem
    unseen = ~visible.any(axis=(1, 2))
    broken_k, broken_v = (array.swapaxes(1, 2).copy() for array in (k, v))
    broken_k[unseen], broken_v[unseen] = np.inf, np.nan
    broken = full(q, broken_k.swapaxes(1, 2), broken_v.swapaxes(1, 2), mask=visible)
    assert_same(broken, full(q, k, v, mask=visible))


@given(problems(), st.floats(0.1, 50))
def test_a_soft_cap_bounds_the_logits_and_a_high_cap_changes_nothing(
    problem: AttentionInputs, cap: float
):
    q, k, v, visible = problem
    weights = full(10 * q, k, v, mask=visible, softcap=cap).weights
    floor = np.exp(-2 * cap) / k.shape[2]
    assert (weights[visible] >= floor * (1 - 1e-9)).all()
    high = full(q, k, v, mask=visible, softcap=1e9)
    np.testing.assert_allclose(high.out, full(q, k, v, mask=visible).out, rtol=1e-6, atol=1e-6)


@given(problems())
def test_a_sink_is_a_key_with_a_zero_value(problem: AttentionInputs):
    q, k, v, visible = problem
    H, groups = q.shape[1], q.shape[1] // k.shape[1]
    sinks = np.linspace(-2, 2, H)
    k, v = (array.repeat(groups, axis=1) for array in (k, v))
    with_key = full(
        q,
        np.concatenate([np.zeros_like(k[:, :, :1]), k], axis=2),
        np.concatenate([np.zeros_like(v[:, :, :1]), v], axis=2),
        mask=np.concatenate([np.ones_like(visible[..., :1]), visible], axis=-1),
        bias=np.concatenate(
            [np.broadcast_to(sinks[:, None, None], visible[..., :1].shape), 0.0 * visible], axis=-1
        ),
    )
    with_sink = full(q, k, v, mask=visible, sinks=sinks)
    assert_same(with_sink, with_key._replace(weights=with_key.weights[..., 1:]))
    np.testing.assert_allclose(
        with_sink.weights.sum(axis=-1) + np.exp(sinks[:, None] - with_sink.lse), 1.0, rtol=1e-12
    )


@given(problems())
def test_masks_broadcast_from_two_axes_or_four(problem: AttentionInputs):
    q, k, v, visible = problem
    wide = visible.shape
    for narrow in (visible[0, 0], visible[:, :1], visible[:1], visible[:, :, :1], visible[..., :1]):
        whole = np.broadcast_to(narrow, wide)
        assert_same(full(q, k, v, mask=narrow), full(q, k, v, mask=whole))


@given(problems())
def test_arguments_are_not_modified(problem: AttentionInputs):
    kept = [array.copy() for array in problem]
    q, k, v, visible = problem
    full(q, k, v, mask=visible, causal=True, softcap=3.0)
    for before, after in zip(kept, problem, strict=True):
        np.testing.assert_array_equal(before, after)


def test_huge_logits_neither_overflow_nor_turn_into_nan():
    q, k = np.full((1, 1, 1, 1), 1e4), np.array([[[[1e4], [-1e4]]]])
    out, weights, lse = full(q, k, k)
    assert weights.tolist() == [[[[1.0, 0.0]]]]
    assert lse.item() == 1e8
    assert out.item() == 1e4


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_the_output_has_the_dtype_of_the_input_and_is_rounded_once(kind: type):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, 3, 5)).astype(kind) for _ in range(3))
    exact = full(*(array.astype(np.float64) for array in (q, k, v)))
    for ours, wide in zip(full(q, k, v), exact, strict=True):
        assert ours.dtype == kind
        np.testing.assert_array_equal(ours, wide.astype(kind))


def test_integers_give_floats():
    ones = np.ones((1, 1, 2, 1), dtype=np.int64)
    values = np.array([0, 1]).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(reference.attention(ones, ones, values), 0.5)


def test_only_requested_outputs_are_returned():
    q = np.ones((1, 1, 2, 3))
    assert isinstance(reference.attention(q, q, q), np.ndarray)
    assert reference.attention(q, q, q, need_lse=True).weights is None
    assert reference.attention(q, q, q, need_weights=True).lse is None
