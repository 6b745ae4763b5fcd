"""The example of entropy collapse: a short and a full run of its script, and its page."""

import importlib.util
import math
from pathlib import Path

import pytest

from headwise.lab import TrainSettings

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "examples" / "entropy_collapse.py", ROOT / "docs" / "entropy-collapse.md"

_spec = importlib.util.spec_from_file_location("entropy_collapse", SCRIPT)
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


@pytest.mark.full
def test_a_short_run_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--seeds", "0", "3", "--steps", "20"])
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert script.table([]).splitlines() == [head, line]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| 0", "0.002"], ["| 3", "0.002"], ["| 0", "0.06"], ["| 3", "0.06"],
    ]  # fmt: skip


def test_a_short_run_with_the_clip_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--seeds", "0", "--steps", "3", "--clip", "1.5"])
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert script.clip_table([]).splitlines() == [head, line]
    none, clipped = (row.strip("| ").split(" | ") for row in rows)
    assert none[:5] == ["0", "none", "2", "–", "–"]
    assert clipped[:2] == ["0", "after each step"]
    assert int(clipped[2]) > 2  # logits of the batch after a clip
    assert 0 < int(clipped[4]) <= 3


def test_a_rise_is_measured_from_the_minimum_and_after_its_patience() -> None:
    rise = script.Rise(by=0.5, patience=2)
    for step, loss in enumerate([3.0, 2.0, 2.6, 2.4, 2.6, 2.6, 1.0], 1):
        rise.follow(step, loss)
    assert (rise.alarm, rise.lowest, rise.lowest_at) == (6, 1.0, 7)
    rise.follow(8, math.nan)
    assert rise.above == 1


@pytest.mark.full
def test_the_attention_alarm_comes_before_the_loss() -> None:
    settings = TrainSettings(
        seed=2, steps=1000, learning_rate=script.TOO_HIGH, warmup=1000,
        batch_size=16, d_model=64, n_layers=2, dropout=0.0,
    )  # fmt: skip
    run = script.train(settings, every=10)
    alarm = run.first["max_logit above 100"]
    assert alarm.step < min(run.training.alarm or 1001, run.validation.alarm or 1001)
    assert len(run.first) == 2


@pytest.mark.full
def test_a_clip_keeps_a_run_from_collapsing() -> None:
    settings = script.settings_of(seed=1, rate=script.TOO_HIGH, steps=1000)
    run = script.train(settings, every=10, watch_every=1, bar=100.0)
    assert run.clipped_steps > 100
    assert 100.0 < run.highest < 200.0  # without the clip it is in the thousands
    assert run.last < run.validation.lowest + 0.25  # without the clip 0.4 above


def test_the_page_shows_what_the_script_prints() -> None:
    page, options = PAGE.read_text("utf-8"), script.parse([])
    assert script.table([]) in page
    for rate in (script.RIGHT_RATE, script.TOO_HIGH):
        for seed in options.seeds:
            assert f"\n| {seed} | {rate} | " in page
    assert (options.steps, options.every) == (1000, 10)
    assert script.clip_table([]) in page
