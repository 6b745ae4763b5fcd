"""What a monitor cannot do is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.layer import MultiHeadAttention
from headwise.monitor import Above, Below, HeadMonitor

X = torch.zeros(1, 3, 4)


def _layer() -> MultiHeadAttention:
    return MultiHeadAttention(4, 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"every": 0}, "HeadMonitor: every=0"),
        ({"every": 1.5}, r"HeadMonitor: every=1\.5"),
        ({"layers": 3}, "HeadMonitor: layers=3"),
        ({"statistics": []}, r"statistics=\[\]. Give a list of names"),
        ({"statistics": "entropy"}, "statistics='entropy'. Give a list of names"),
        ({"rules": ["entropy < 0.1"]}, r"rules=\['entropy < 0.1'\].*Above\(...\) and Below"),
        ({"rules": Above("entropy", 1.0)}, r"rules=Above\(statistic='entropy'"),
        ({"log": "runs"}, "log='runs'.*SummaryWriter, or a function"),
        ({"on_alarm": "print"}, "on_alarm='print'"),
        ({"statistics": ["entropie"]}, "'entropie'.*Choose from entropy"),
        ({"statistics": ["first"] * 2}, "'first' is requested twice"),
        ({"rules": [Above("sink", 0.5)]}, r"'sink', which is not watched.*'entropy', 'max_logit'"),
    ],
)
def test_impossible_monitors_are_refused(how: dict[str, Any], message: str) -> None:
    model = _layer()
    with pytest.raises(ArgumentError, match=message):
        HeadMonitor(model, **how)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("rule", "how", "message"),
    [
        (Above, ("entropie", 1), "Above: no statistic 'entropie'.*Choose from entropy"),
        (Below, ("entropy", 1, 0), "Below: patience is 0"),
        (Below, ("entropy", float("nan")), "Below: threshold is nan"),
        (Below, ("entropy", 0.1, 1, 0.05), r"Below: release is 0.05 at a threshold of 0.1"),
        (Above, ("max_logit", 100, 1, 101), r"Above: release is 101 at a threshold of 100"),
    ],
)
def test_impossible_rules_are_refused(rule: Any, how: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rule(*how)


def test_a_closed_monitor_is_refused_but_can_be_read() -> None:
    model = _layer()
    with HeadMonitor(model) as monitor:
        model(X)
        monitor.step()
    with pytest.raises(ArgumentError, match=r"HeadMonitor.step: the monitor is closed"):
        monitor.step()
    with pytest.raises(ArgumentError, match=r"HeadMonitor.resume: the monitor is closed"):
        monitor.resume(3)
    assert monitor.max_logit()["L0"].shape == (2,)
    assert monitor.alarms == []


@pytest.mark.parametrize("steps", [-1, 2.0, float("nan"), True, "3", None])
def test_one_cannot_go_on_from_what_is_no_number_of_steps(steps: Any) -> None:
    with (
        HeadMonitor(_layer()) as monitor,
        pytest.raises(ArgumentError, match=rf"resume: steps={steps!r}\. Give a whole number, 0 or"),
    ):
        monitor.resume(steps)
    assert monitor.steps == 0


def test_max_logit_before_anything_was_seen_is_refused() -> None:
    model = _layer()
    with HeadMonitor(model) as monitor:
        with pytest.raises(ArgumentError, match="no step was watched since the last reset"):
            monitor.max_logit()
        model(X)
        monitor.step()
        monitor.reset_max_logit()
        with pytest.raises(ArgumentError, match="no step was watched since the last reset"):
            monitor.max_logit()


def test_max_logit_must_be_watched() -> None:
    with (
        HeadMonitor(_layer(), statistics=["first"]) as monitor,
        pytest.raises(ArgumentError, match=r"not watched.*statistics=\('first', 'max_logit'\)"),
    ):
        monitor.max_logit()


@pytest.mark.parametrize("how", ["evaluation", "no gradients", "no pass", "no attention"])
def test_a_watched_step_without_attention_is_refused(how: str) -> None:
    model: nn.Module = nn.Linear(4, 4) if how == "no attention" else _layer()
    with HeadMonitor(model) as monitor:
        model.train(how != "evaluation")
        with torch.set_grad_enabled(how != "no gradients"):
            if how != "no pass":
                model(X)
        kind = type(model).__name__
        with pytest.raises(
            UnsupportedError, match=f"no attention was captured in step 1 of {kind}"
        ):
            monitor.step()
    assert not model._forward_pre_hooks


def test_a_layer_that_is_not_there_is_refused() -> None:
    model = _layer()
    with HeadMonitor(model, layers=[0, 7]) as monitor:
        model(X)
        with pytest.raises(
            ArgumentError, match=r"layers \[7\] were not captured in step 1.*from 0"
        ):
            monitor.step()


def test_a_call_that_cannot_be_read_is_refused_and_leaves_nothing() -> None:
    model = nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True)
    with (
        pytest.raises(UnsupportedError, match="add_zero_attn"),
        HeadMonitor(model),
    ):
        model(X, X, X)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
