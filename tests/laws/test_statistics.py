"""Statistics of rows equal those of the materialised weights, whatever the rule."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise import reference
from headwise.kernels import RowRequest, RowStatistics, _cells, make_rule, row_statistics
from strategies import Problem, problems, seeds


@pytest.fixture(params=[1 << 19, 24], ids=["one-cell", "many-cells"])
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_cells, "CELL", request.param)
    return request.param


def _rows(problem: Problem, request: RowRequest) -> RowStatistics:
    how = dict(problem.how)
    rule = make_rule(
        head_dim=problem.q.shape[-1],
        is_causal=how.pop("causal", False),
        near=how.pop("window", None),
        **how,
    )
    return row_statistics(*problem.qkv, rule, request)


def _reference(problem: Problem) -> reference.AttentionOutput:
    qkv = (x.numpy() for x in problem.qkv)
    return reference.attention(*qkv, **problem.numpy(), need_weights=True, need_lse=True)


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_they_equal_those_of_the_weights(problem: Problem) -> None:
    found = _rows(problem, RowRequest(distance=True, heads=True))
    known = _reference(problem)
    weights = known.weights
    logs = np.log(np.where(weights > 0, weights, 1.0))
    T, S = weights.shape[-2:]
    away = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    close = {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(found.lse, known.lse, **close)
    np.testing.assert_allclose(found.heads, known.out, **close)
    np.testing.assert_allclose(found.entropy, -(weights * logs).sum(-1), **close)
    np.testing.assert_allclose(found.max_weight, weights.max(-1), **close)
    np.testing.assert_allclose(found.distance, (weights * away).sum(-1), **close)
    np.testing.assert_array_equal(found.n_keys, (weights > 0).sum(-1))
    seen = weights > 0
    even = (away * seen).sum(-1) / np.maximum(seen.sum(-1), 1)
    np.testing.assert_allclose(found.even_distance, even, **close)
    if found.sink is not None:
        np.testing.assert_allclose(found.sink, 1 - weights.sum(-1), **close)


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_the_largest_logit_is_of_visible_keys_without_bias(problem: Problem) -> None:
    q, k, _ = problem.qkv
    scale = problem.how.get("scale", q.shape[-1] ** -0.5)
    logits = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    if cap := problem.how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    seen = torch.from_numpy(_reference(problem).weights > 0)
    expected = logits.masked_fill(~seen, -torch.inf).amax(-1)
    torch.testing.assert_close(_rows(problem, RowRequest()).max_logit, expected)


@pytest.mark.usefixtures("cell")
@given(problem=problems(), seed=seeds)
def test_mass_on_keys_and_classes_is_that_of_the_weights(problem: Problem, seed: int) -> None:
    B, H, T, _ = problem.q.shape
    S = problem.k.shape[2]
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randint(-1, S, (B, T, 3), generator=rng)
    classes = (torch.rand(B, S, 2, generator=rng) < 0.5).double()
    found = _rows(problem, RowRequest(entropy=False, keys=keys, classes=classes))
    weights = torch.from_numpy(_reference(problem).weights)
    seen = weights > 0
    at = keys[:, None].expand(B, H, T, 3)
    expected = weights.gather(-1, at.clamp(min=0)).masked_fill(at < 0, 0.0)
    torch.testing.assert_close(found.key_mass, expected)
    assert torch.equal(found.key_seen, seen.gather(-1, at.clamp(min=0)) & (at >= 0))
    torch.testing.assert_close(found.class_mass, weights @ classes[:, None])
    torch.testing.assert_close(found.class_keys, seen.double() @ classes[:, None])
    assert found.entropy is None


@given(problem=problems(), size=st.sampled_from([1.0, 30.0]))
def test_every_statistic_stays_in_its_range(problem: Problem, size: float) -> None:
    single = (x.float() * size for x in problem.qkv)
    found = _rows(Problem(*single, problem.how | _float_extras(problem)), RowRequest())
    assert (found.entropy >= 0).all()
    # What a sink takes is one more share, though its own term is not part of the entropy.
    shares = found.n_keys.clamp(min=1) + ("sinks" in problem.how)
    assert (found.entropy <= shares.log() + 1e-5).all()
    assert ((found.max_weight >= 0) & (found.max_weight <= 1 + 1e-6)).all()


def _float_extras(problem: Problem) -> dict[str, torch.Tensor]:
    return {n: problem.how[n].float() for n in ("bias", "sinks") if n in problem.how}


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_entropy_is_as_exact_as_that_of_float32_weights(size: float) -> None:
    q, k, v = (torch.randn(1, 3, 251, 64, dtype=torch.float64) for _ in range(3))
    q = q * size
    rule = make_rule(head_dim=64, is_causal=True)
    exact = row_statistics(q, k, v, rule, RowRequest()).entropy
    ours = row_statistics(q.float(), k.float(), v.float(), rule, RowRequest()).entropy
    hidden = torch.ones(251, 251, dtype=torch.bool).triu(1)
    logits = (q.float() @ k.float().transpose(-1, -2) / 8).masked_fill(hidden, -torch.inf)
    plain = torch.special.entr(logits.softmax(-1)).sum(-1)
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_no_array_grows_with_the_square_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    whole = _cells.powers_of_cell

    def measured(*args: object) -> _cells.Powers:
        nonlocal largest
        soft = whole(*args)
        largest = max(largest, soft.powers.numel())
        return soft

    monkeypatch.setattr("headwise.kernels._statistics.powers_of_cell", measured)
    q = torch.randn(1, 2, 4096, 4)
    row_statistics(q, q, q, make_rule(head_dim=4, is_causal=True), RowRequest())
    assert 0 < largest <= _cells.CELL < 2 * 4096 * 4096 / 50
