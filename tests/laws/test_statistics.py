"""Statistics of rows equal those of the materialised weights, whatever the rule."""

from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from describing import assert_same, cast, described, everything
from headwise._native_library import library
from headwise.errors import ArgumentError
from headwise.kernels import (
    AttentionProblem,
    RowRequest,
    RowStatistics,
    _attend,
    make_rule,
    row_statistics,
)
from headwise.kernels.rows import ROWS, _cells
from headwise.kernels.rows._kernel import RowsKernel
from strategies import Problem, problems, seeds


@pytest.fixture(params=[1 << 19, 24], ids=["one-cell", "many-cells"])
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_cells, "CELL", request.param)
    return request.param


@pytest.mark.parametrize(
    "lacking",
    [
        "entropy", "distance", "participation", "argmax", "received", "keys", "classes", "top",
        "key_norms", "heads",
    ],
)  # fmt: skip
def test_what_a_kernel_lacks_alone_comes_from_the_rows(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RowRequest] = []

    class Quick(RowsKernel):
        name = label = "quick"

        def lacks(self, request: RowRequest) -> dict[str, str]:
            return {lacking: "much", "not requested": "more"}

        def statistics(self, problem: AttentionProblem, request: RowRequest) -> RowStatistics:
            asked.append(request)
            return super().statistics(problem, request)

    rest = Mock(wraps=ROWS.statistics)
    monkeypatch.setattr(_attend, "KERNELS", (Quick(), ROWS))
    monkeypatch.setattr(ROWS, "statistics", rest)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 6), torch.randn(2, 2, 9, 6), torch.randn(2, 2, 9, 6)
    problem = Problem(q, k, v, {"causal": True})
    request = everything(problem, 0, argmax=True, top=True)
    exact = described(problem, request, "rows")
    rest.reset_mock()
    ours = described(problem, request, "auto")
    assert_same(ours, exact, 1e-6)
    assert ours.kernel == "quick (much: blocks of rows)"
    (own,) = asked
    assert own.requested == request.requested - {lacking}
    other = rest.call_args.args[1].requested
    measures, columns = {"top", "key_norms"}, {"keys", "classes"}
    needed = {*(columns if lacking in measures else ()), *(measures if lacking in columns else ())}
    assert other == {lacking} | needed
    with pytest.raises(ArgumentError, match=r"backend='quick' cannot .*it does not compute much"):
        described(problem, request, "quick")


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_row_statistics_equal_those_of_the_weights(problem: Problem) -> None:
    result = described(problem, RowRequest(distance=True, heads=True), "auto")
    known = problem.by_definition()
    weights = known.weights
    logs = np.log(np.where(weights > 0, weights, 1.0))
    T, S = weights.shape[-2:]
    away = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    close = {"rtol": 1e-9, "atol": 1e-11}
    np.testing.assert_allclose(result.lse, known.lse, **close)
    np.testing.assert_allclose(result.heads, known.out, **close)
    np.testing.assert_allclose(result.entropy, -(weights * logs).sum(-1), **close)
    np.testing.assert_allclose(result.max_weight, weights.max(-1), **close)
    np.testing.assert_allclose(result.distance, (weights * away).sum(-1), **close)
    np.testing.assert_array_equal(result.n_keys, (weights > 0).sum(-1))
    visible = weights > 0
    even = (away * visible).sum(-1) / np.maximum(visible.sum(-1), 1)
    np.testing.assert_allclose(result.even_distance, even, **close)
    if result.sink is not None:
        np.testing.assert_allclose(result.sink, 1 - weights.sum(-1), **close)


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_the_largest_logit_is_of_visible_keys_without_bias(problem: Problem) -> None:
    q, k, _ = problem.qkv
    scale = problem.how.get("scale", q.shape[-1] ** -0.5)
    logits = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    if cap := problem.how.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    visible = torch.from_numpy(problem.by_definition().weights > 0)
    expected = logits.masked_fill(~visible, -torch.inf).amax(-1)
    torch.testing.assert_close(described(problem, RowRequest(), "auto").max_logit, expected)


@dataclass(frozen=True)
class _Columns:
    """Keys and classes of a problem, and the sums of amounts over them."""

    keys: Tensor
    classes: Tensor

    @classmethod
    def draw(cls, problem: Problem, seed: int) -> "_Columns":
        B, T, S = problem.q.shape[0], problem.q.shape[2], problem.k.shape[2]
        rng = torch.Generator().manual_seed(seed)
        classes = torch.rand(B, S, 2, generator=rng) < 0.5
        return cls(torch.randint(-1, S, (B, T, 3), generator=rng), classes.double())

    def of(self, amounts: Tensor) -> tuple[Tensor, Tensor]:
        index = self.keys[:, None].expand(-1, amounts.shape[1], -1, -1)
        single = amounts.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0)
        return single, amounts.double() @ self.classes[:, None]


def _draw_columns(problem: Problem, seed: int) -> tuple[_Columns, Tensor]:
    return _Columns.draw(problem, seed), torch.from_numpy(problem.by_definition().weights)


@pytest.mark.usefixtures("cell")
@given(problem=problems(), seed=seeds)
def test_mass_on_keys_and_classes_equals_that_of_the_weights(problem: Problem, seed: int) -> None:
    columns, weights = _draw_columns(problem, seed)
    request = RowRequest(entropy=False, keys=columns.keys, classes=columns.classes)
    result = described(problem, request, "auto")
    key_mass, class_mass = columns.of(weights)
    torch.testing.assert_close(result.key_mass, key_mass)
    torch.testing.assert_close(result.class_mass, class_mass)
    key_seen, class_keys = columns.of(weights > 0)
    assert torch.equal(result.key_seen, key_seen)
    torch.testing.assert_close(result.class_keys, class_keys)
    assert result.entropy is result.key_top is result.key_share is result.received is None


@pytest.mark.usefixtures("cell")
@given(problem=problems(), seed=seeds, even=st.booleans())
def test_the_top_key_has_the_largest_weight_and_ties_share_it(
    problem: Problem, seed: int, even: bool
) -> None:
    if even:  # every visible key ties, unless a bias tells them apart
        problem.q.zero_()
    columns, weights = _draw_columns(problem, seed)
    request = RowRequest(keys=columns.keys, classes=columns.classes, top=True)
    result = described(problem, request, "auto")
    peak = weights.amax(-1, keepdim=True)
    largest = torch.isclose(weights, peak, rtol=1e-12, atol=0) & (weights > 0)
    key_top, class_top = columns.of(largest.double() / largest.sum(-1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(result.key_top, key_top)
    torch.testing.assert_close(result.class_top, class_top)


@pytest.mark.usefixtures("cell")
@given(problem=problems(), seed=seeds)
def test_shares_of_the_output_weigh_each_key_by_its_norm(problem: Problem, seed: int) -> None:
    columns, weights = _draw_columns(problem, seed)
    rng = torch.Generator().manual_seed(seed)
    norms = torch.rand(*weights.shape[:2], weights.shape[-1], generator=rng, dtype=torch.float64)
    request = RowRequest(keys=columns.keys, classes=columns.classes, key_norms=norms)
    result = described(problem, request, "auto")
    parts = weights * norms[:, :, None]
    key_share, class_share = (part / parts.sum(-1, keepdim=True) for part in columns.of(parts))
    torch.testing.assert_close(result.key_share, key_share, equal_nan=True)
    torch.testing.assert_close(result.class_share, class_share, equal_nan=True)
    assert torch.equal(result.class_share.isnan().all(-1), result.n_keys == 0)


def test_shares_of_keys_without_a_norm_are_nan() -> None:
    q = torch.randn(1, 2, 5, 3)
    norms = torch.tensor([0.0, 0.0, torch.nan, torch.inf, 1.0]).expand(1, 2, 5)
    request = RowRequest(classes=torch.eye(5)[None], key_norms=norms)
    result = row_statistics(q, q, q, make_rule(head_dim=3, is_causal=True), request)
    assert result.class_share[:, :, :4].isnan().all()
    assert torch.equal(result.class_share[:, :, 4, 4], torch.ones(1, 2))


@pytest.mark.usefixtures("cell")
@given(problem=problems(), seed=seeds)
def test_what_keys_receive_is_the_sum_of_a_column(problem: Problem, seed: int) -> None:
    weights = torch.from_numpy(problem.by_definition().weights)
    B, _, T, _ = weights.shape
    counted = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.7
    expected = (weights * counted[:, None, :, None]).sum(-2)
    torch.testing.assert_close(
        described(problem, RowRequest(received=counted), "auto").received, expected
    )
    problem.q[~counted[:, None].expand(-1, problem.q.shape[1], -1)] = torch.nan
    torch.testing.assert_close(
        described(problem, RowRequest(received=counted), "auto").received, expected
    )


@pytest.mark.usefixtures("cell")
@given(problem=problems())
def test_participation_is_the_effective_number_of_keys(problem: Problem) -> None:
    weights = torch.from_numpy(problem.by_definition().weights)
    squares = weights.square().sum(-1)
    expected = weights.sum(-1).square() / squares.where(squares > 0, 1.0)
    result = described(problem, RowRequest(participation=True), "auto")
    torch.testing.assert_close(result.participation, expected)
    assert torch.equal(result.participation == 0, result.n_keys == 0)


def test_participation_ignores_a_sink_far_above_all_logits() -> None:
    q = torch.zeros(1, 1, 3, 2)
    rule = make_rule(head_dim=2, sinks=torch.tensor([200.0]))
    result = row_statistics(q, q, q, rule, RowRequest(participation=True))
    torch.testing.assert_close(result.participation, torch.full((1, 1, 3), 3.0))


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


@pytest.mark.parametrize("backend", ["rows", "native"] if library() else ["rows"])
@pytest.mark.parametrize("wild", [torch.nan, torch.inf, -torch.inf])
@given(problem=problems(), seed=seeds)
def test_hidden_keys_change_no_statistic(
    backend: str, wild: float, problem: Problem, seed: int
) -> None:
    problem = cast(problem, torch.float32)
    T, S = problem.q.shape[2], problem.k.shape[2]
    hidden = torch.rand(S) < 0.4
    problem.how["mask"] = ~hidden[None].expand(T, S)
    request = everything(problem, seed, top=True, argmax=True)
    calm = described(problem, request, backend)
    problem.k[:, :, hidden], problem.v[:, :, hidden] = wild, wild
    assert_same(described(problem, request, backend), calm, 0.0)


def test_memory_does_not_grow_with_the_square_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    whole = _cells.powers_of_cell

    def measured(*args: object) -> _cells.Powers:
        nonlocal largest
        soft = whole(*args)
        largest = max(largest, soft.powers.numel())
        return soft

    monkeypatch.setattr("headwise.kernels.rows._kernel.powers_of_cell", measured)
    q = torch.randn(1, 2, 4096, 4)
    rule = make_rule(head_dim=4, is_causal=True)
    row_statistics(q, q, q, rule, RowRequest(), backend="rows")
    assert 0 < largest <= _cells.CELL < 2 * 4096 * 4096 / 50
