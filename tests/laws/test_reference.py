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


side = st.none() | st.integers(0, 4)
FORMS = ("boolean", "added", np.float16, np.float32, np.float64)


@given(
    problem=problems(), form=st.sampled_from(FORMS), causal=st.booleans(), biased=st.booleans(),
    window=st.none() | st.tuples(side, side), softcap=st.sampled_from([None, 0.5, 3.0]),
    scale=st.sampled_from([None, 0.9]), has_sinks=st.booleans(),
)  # fmt: skip
def test_loops_in_plain_python_give_the_same(
    problem: AttentionInputs, form: str | type, causal: bool, biased: bool, window: tuple | None,
    softcap: float | None, scale: float | None, has_sinks: bool,
):  # fmt: skip
    q, k, v, visible = problem
    (B, H, T, D), (Hkv, S) = q.shape, v.shape[1:3]
    rng, mask = np.random.default_rng(0), visible
    bias = added = biased * rng.uniform(-2, 2, visible.shape)
    if form == "added":
        more = rng.uniform(-2, 2, visible.shape)
        mask, added = np.where(visible, more, -np.inf), bias + more
    elif form != "boolean":  # the lowest number of a dtype hides as -inf does
        mask = np.where(visible, 0.0, np.finfo(form).min).astype(form)
    sinks = np.linspace(-2, 2, H) if has_sinks else None
    options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    out = full(q, k, v, mask=mask, bias=bias if biased else None, sinks=sinks, **options)
    left, right = window or (None, None)
    right = 0 if causal else right
    for b, h, t in np.ndindex(B, H, T):
        exps = np.zeros(S)
        for s in range(S):
            ahead, kv = s - (t + S - T), h * Hkv // H
            inside = (left is None or ahead >= -left) and (right is None or ahead <= right)
            if visible[b, h, t, s] and inside:
                logit = sum(q[b, h, t, d] * k[b, kv, s, d] for d in range(D))
                logit *= D**-0.5 if scale is None else scale
                logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
                exps[s] = math.exp(logit + added[b, h, t, s])
        total = exps.sum() + (math.exp(sinks[h]) if has_sinks else 0)
        weights = exps / total if total else exps
        close = {"rtol": 1e-10, "atol": 1e-12}
        np.testing.assert_allclose(out.weights[b, h, t], weights, **close)
        np.testing.assert_allclose(out.out[b, h, t], weights @ v[b, h * Hkv // H], **close)
        assert out.lse[b, h, t] == pytest.approx(math.log(total) if total else -math.inf)


@given(problems())
def test_the_definition_equals_the_printed_formula(problem: AttentionInputs):
    q, k, v, visible = problem
    groups = q.shape[1] // k.shape[1]
    k, v = (array.repeat(groups, axis=1) for array in (k, v))
    out, weights = scaled_dot_product(q, k, v, visible)
    ours = full(q, k, v, mask=visible)
    np.testing.assert_allclose(ours.out, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours.weights, weights, rtol=1e-12, atol=1e-12)


def test_a_mask_and_a_bias_of_few_digits_are_added_in_full():
    q = np.zeros((1, 1, 1, 1))
    mask, bias = np.full((1, 1), 1000, np.float16), np.full((1, 1), 0.125, np.float16)
    assert full(q, q, q, mask=mask, bias=bias).lse.item() == 1000.125


@given(problems())
def test_masked_keys_never_change_the_output(problem: AttentionInputs):
    q, k, v, visible = problem
    unseen = ~visible.any(axis=(1, 2))
    broken_k, broken_v = (array.swapaxes(1, 2).copy() for array in (k, v))
    broken_k[unseen], broken_v[unseen] = np.inf, np.nan
    broken = full(q, broken_k.swapaxes(1, 2), broken_v.swapaxes(1, 2), mask=visible)
    assert_same(broken, full(q, k, v, mask=visible))


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
