"""Looking ahead: no logit of a training pass is over the bar, and nothing but weights changes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.layer import MultiHeadAttention
from headwise.models import rehearse
from headwise.monitor import HeadMonitor, LookAhead, QKClip

BAR, STEPS = 2.0, 6
IDS = torch.randint(0, 13, (STEPS, 3, 9), generator=torch.Generator().manual_seed(0))


def _model(**options: Any) -> MiniGPT:
    torch.manual_seed(1)
    sizes = {"d_model": 12, "n_heads": 4, "n_kv_heads": 2, "n_layers": 3} | options
    return MiniGPT(MiniGPTConfig(13, 12, **sizes))


@contextmanager
def _clipped(
    model: nn.Module, bar: float = BAR, **options: Any
) -> Iterator[tuple[HeadMonitor, QKClip]]:
    with HeadMonitor(model, 1, statistics=["max_logit"]) as monitor:
        yield monitor, QKClip(monitor, bar, **options)


def _grow(model: nn.Module, factor: float = 1.7) -> None:
    """A planted step of an optimizer: all logits grow by the square of a factor."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(factor)


def _largest(monitor: HeadMonitor) -> float:
    assert monitor.latest is not None
    return float(monitor.latest.values["max_logit"].max())


def _train(model: nn.Module, looks: bool, **options: Any) -> tuple[list[float], list[LookAhead]]:
    """The largest logit of each training pass, while weights grow quickly; and the reports."""
    logits, reports = [], []
    with _clipped(model, **options) as (monitor, clip):
        for ids in IDS:
            if looks:
                reports.append(clip.look_ahead(ids))
            model(ids).square().mean().backward()
            _grow(model)
            monitor.step()
            logits.append(_largest(monitor))
            clip.step()
    return logits, reports


def test_logits_that_grow_quickly_stay_below_the_bar() -> None:
    without, _ = _train(_model(), looks=False)
    logits, reports = _train(_model(), looks=True)
    assert max(without[1:]) > 1.5 * BAR
    assert max(logits) <= BAR
    assert sum(bool(report.heads) for report in reports) >= STEPS - 2
    assert all(report.within_bar and report.passes <= 4 for report in reports)
    assert any(report.passes > 2 for report in reports)  # a clip changes what later layers read


def test_dropout_draws_what_the_training_pass_draws() -> None:
    torch.manual_seed(5)
    logits, reports = _train(_model(dropout=0.3), looks=True)
    assert any(report.heads for report in reports)
    assert max(logits) <= BAR


class _Drawing(nn.Module):
    """Everything that a pass may change: draws of three libraries, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.attention, self.norm = MultiHeadAttention(12, 4), nn.BatchNorm1d(12)
        self.frozen = nn.BatchNorm1d(12).eval()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.passes = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.passes += 1
        self.calls = self.calls + 1  # another tensor
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        y = self.norm((scale * x + noise).mT) + self.frozen(x.mT)
        return F.dropout(self.attention(y.mT), 0.5)


def _states() -> list[Any]:
    # Python's own state is left out: checks of types draw from it in tests.
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
    return [numpy, torch.get_rng_state().tolist()]


def _bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("bar", [100.0, 1e-3])
def test_nothing_but_clipped_weights_changes(bar: float) -> None:
    model, x = _Drawing(), torch.randn(2, 7, 12)
    with _clipped(model, bar, reference=[(x,)]) as (monitor, clip):
        model(x).square().mean().backward()
        gradients = [y.grad.clone() for y in model.parameters() if y.grad is not None]
        before, states, passes = _bits(model), _states(), model.passes
        buffer, modes = model.calls, [module.training for module in model.modules()]
        report = clip.look_ahead((x,))
        assert model.passes == passes + report.passes > passes
        assert _states() == states
        assert model.calls is buffer
        assert [module.training for module in model.modules()] == modes
        assert monitor.steps == 0
    after = _bits(model)
    changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
    scaled = {"attention.q_proj.weight", "attention.k_proj.weight"}
    assert changed == (scaled if bar < 1 else set())
    kept = [y.grad for y in model.parameters() if y.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(gradients, kept, strict=True))


def test_a_rehearsal_restores_the_random_state_of_python() -> None:
    model, x = _Drawing(), torch.randn(2, 7, 12)
    state = random.getstate()
    rehearse(model, [x, x])
    assert model.passes == 2
    assert random.getstate() == state


def test_the_monitor_counts_training_passes_alone() -> None:
    counted = []
    for looks in (False, True):
        model = _model()
        with HeadMonitor(model, 1, statistics=["max_logit", "entropy"]) as monitor:
            clip = QKClip(monitor, 100.0)
            if looks:
                assert clip.look_ahead([IDS[1], IDS[2]]).passes == 1
            model(IDS[0])
            if looks:
                assert clip.look_ahead(IDS[3]).passes == 1
            counted.append(monitor.step())
    assert counted[0] == counted[1]


def test_training_below_the_bar_is_equal_to_the_last_bit() -> None:
    plain, watched = _model(dropout=0.2), _model(dropout=0.2)
    for model in (plain, watched):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with _clipped(watched, 100.0, near=0.0) as (monitor, clip):
            for ids in IDS:
                if model is watched:
                    assert clip.look_ahead(ids).passes == 1
                model(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if model is watched:
                    monitor.step()
                    clip.step()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name


@pytest.mark.parametrize(("near", "passes"), [(0.0, 1), (0.5, 1), (0.9, 0)])
def test_only_a_model_near_the_bar_is_run(near: float, passes: int) -> None:
    model = _model()
    with _clipped(model, 1e9) as (monitor, _):
        model(IDS[0])
        monitor.step()
        bar = _largest(monitor) / 0.7
    with _clipped(model, bar, near=near) as (monitor, clip):
        assert clip.look_ahead(IDS[0]).passes == 1  # no logit is known yet
        model(IDS[0])
        monitor.step()
        clip.step()
        report = clip.look_ahead(IDS[0])
    assert report == LookAhead(2, passes, (), within_bar=True)
    said = "1 pass, clipped no head" if passes else "no head near the bar"
    assert str(report) == f"before step 2: {said}"


class _Inputs(nn.Module):
    """Attention whose queries and keys grow with an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = MultiHeadAttention(12, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(scale * x)


X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "batch", [X, (X,), (X, 1.0), {"x": X, "scale": 1.0}, [X], [(0.1 * X,), {"x": X}, 0.2 * X]],
    ids=["argument", "tuple of one", "tuple", "names", "list", "several"],
)  # fmt: skip
def test_every_form_of_batch_is_run(batch: Any) -> None:
    model = _Inputs()
    with _clipped(model, 1.0, reference=[X]) as (monitor, clip):
        report = clip.look_ahead(batch)
        model(X)
        monitor.step()
        assert max(head.max_logit for head in report.heads) > 1.0
        assert 0.999 < _largest(monitor) <= 1.0
        assert clip.step().heads == ()


def _scales(new: Tensor, old: Tensor, heads: int) -> np.ndarray:
    """What the rows of each head were multiplied by."""
    ratios = (new.norm(dim=1) / old.norm(dim=1)).view(heads, -1)
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios))
    return ratios[:, 0].double().numpy()


def test_a_report_names_heads_with_the_product_of_their_factors() -> None:
    model = _model()
    _grow(model, 4.0)
    old = _bits(model)
    with _clipped(model) as (_, clip):
        report = clip.look_ahead(IDS[0])
    assert report.passes > 2
    assert str(report).startswith(f"before step 1: {report.passes} passes, clipped L0.H")
    factors = np.ones((3, 4))
    for clipped in report.heads:
        assert clipped.max_logit > BAR
        factors[clipped.head.layer, clipped.head.head] = clipped.factor
    assert len(report.heads) == (factors < 1).sum()
    new = _bits(model)
    for layer in range(3):
        queries, keys = (
            _scales(new[name], old[name], heads)
            for part, heads in (("q", 4), ("k", 2))
            for name in [f"blocks.{layer}.attention.{part}_proj.weight"]
        )
        np.testing.assert_allclose(queries * keys.repeat(2), factors[layer], rtol=1e-5)


class _Failing(nn.Module):
    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.inner, self.fails_at, self.passes = _model(), fails_at, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.passes += 1
        self.calls += 1
        torch.rand(1)
        if self.passes == self.fails_at:
            raise MemoryError("on purpose")
        return self.inner(ids)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_exception_leaves_everything_as_it_was(fails_at: int) -> None:
    model = _Failing(1000)
    _grow(model, 4.0)
    with _clipped(model, reference=[IDS[0]]) as (monitor, clip):
        before, states = _bits(model), _states()
        model.passes, model.fails_at = 0, fails_at
        with pytest.raises(MemoryError, match="on purpose"):
            clip.look_ahead(IDS[0])
        assert all(torch.equal(x, before[name]) for name, x in _bits(model).items())
        assert _states() == states
        assert clip.look_ahead(IDS[0]).heads  # a second try
        model(IDS[0])
        monitor.step()
        assert _largest(monitor) <= BAR


def test_a_failing_clip_scales_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    _grow(model, 4.0)
    before, multiply, calls = _bits(model), Tensor.mul_, []

    def failing(x: Tensor, factor: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) == 8:  # in the second pass
            raise MemoryError("on purpose")
        return multiply(x, factor)

    with _clipped(model) as (_, clip), monkeypatch.context() as patched:
        patched.setattr(Tensor, "mul_", failing)
        with pytest.raises(MemoryError, match="on purpose"):
            clip.look_ahead(IDS[0])
    assert all(torch.equal(x, before[name]) for name, x in _bits(model).items())


def test_a_batch_is_run_at_most_twice_for_each_layer_and_once_more() -> None:
    class Growing(nn.Module):
        """Two layers that share their weights, with larger inputs from pass to pass."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer, self.scale, self.grows = MultiHeadAttention(12, 4), 1.0, False

        def forward(self, x: Tensor) -> Tensor:
            self.scale *= 2.0 if self.grows else 1.0
            return self.layer(self.layer(self.scale * x))

    model = Growing()
    with _clipped(model, 0.01, reference=[X]) as (_, clip):
        model.grows = True
        report = clip.look_ahead(X)
    assert (report.passes, report.within_bar) == (5, False)
    assert str(report).endswith("; heads are still over the bar")


def test_a_pass_under_autocast_reads_the_clipped_weights() -> None:
    model = _Inputs()
    _grow(model, 3.0)
    with (
        _clipped(model, 2.0, reference=[X], near=0.0) as (monitor, clip),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(0.1 * X)  # a pass whose weights autocast keeps
        monitor.step()
        clip.step()
        report = clip.look_ahead(X)
        model(X).float().square().mean().backward()
        monitor.step()
        assert report.heads
        assert report.within_bar
        assert _largest(monitor) <= 2.0
        assert torch.is_autocast_cache_enabled()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_compiled_model_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model = _Inputs()
    compiled = torch.compile(model, backend="eager")
    with _clipped(compiled, 1e-3, reference=[X]) as (monitor, clip):
        assert clip.look_ahead(X).passes == 2
        compiled(X)
        monitor.step()
        assert clip.step().heads == ()
