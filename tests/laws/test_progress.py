"""Progress is shown for long work alone, and never changes a result."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import _progress
from headwise._progress import progress_bar, shows_progress
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.roles import Evidence
from oracles import assert_tables_close
from planted import TOKENIZER, lines


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    yield
    hw.progress(True)
    assert not _progress._bar_is_open


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "SECONDS_BEFORE_BAR", 0.0)
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", 0.0)


def _shown(label: str = "Studying") -> str:
    printed = io.StringIO()
    with redirect_stderr(printed), progress_bar(label) as on_progress:
        for done in (1, 2, 3):
            on_progress(done, 6, "reading")
        on_progress(1, 4)  # another stage
    return printed.getvalue()


def test_short_work_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown() == ""
    monkeypatch.setattr(_progress, "SECONDS_BEFORE_BAR", 0.0)
    assert _progress.SECONDS_BETWEEN_LINES == 30
    assert "1/6" not in _shown()


@pytest.mark.usefixtures("_at_once")
def test_long_work_shows_its_label_steps_and_time() -> None:
    shown = _shown("Studying\x1b[2J a\nmodel")
    assert "\x1b[2J" not in shown
    assert re.search(r"Studying\ufffd\[2J a\ufffdmodel: +50%.* 3/6 \[.*reading\]", shown)
    assert "1/4" in shown


@pytest.mark.usefixtures("_at_once")
def test_bars_can_be_switched_off() -> None:
    hw.progress(False)
    assert _shown() == ""
    hw.progress(True)
    assert _shown() != ""


@pytest.mark.usefixtures("_at_once")
def test_a_bar_inside_another_shows_nothing() -> None:
    printed = io.StringIO()
    with redirect_stderr(printed), progress_bar("Outer") as on_progress:
        on_progress(1, 2)
        with progress_bar("Inner") as inner:
            inner(1, 3)
    assert "Outer" in printed.getvalue()
    assert "Inner" not in printed.getvalue()


@pytest.mark.usefixtures("_at_once")
def test_a_callback_replaces_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    @shows_progress("Working")
    def work(*, on_progress: Any = None) -> None:
        on_progress(1, 2)

    calls: list[tuple[int, int]] = []
    work(on_progress=lambda *steps: calls.append(steps))
    assert (calls, capsys.readouterr().err) == ([(1, 2)], "")
    work()
    assert "1/2" in capsys.readouterr().err


@pytest.mark.full
def test_passes_over_texts_are_one_progress() -> None:
    torch.manual_seed(0)
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(vocab_size=size, n_layers=1, d_model=16, context=48))
    calls: list[tuple[int, int]] = []
    evidence = Evidence(("permuted",), models=2, splits=1)
    hw.find_roles(
        model,
        lines(8),
        tokenizer=TOKENIZER,
        evidence=evidence,
        on_progress=lambda *now: calls.append(now),
    )
    done, total = zip(*calls, strict=True)
    assert set(total) == {3 * 8 + 4 * 100}  # texts, sequences and one contrast of the sequences
    assert list(done) == sorted(set(done))
    assert done[-1] == total[-1]


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_bar(error: type[BaseException]) -> None:
    with redirect_stderr(io.StringIO()), pytest.raises(error), progress_bar("Failing"):
        raise error


@pytest.mark.usefixtures("_at_once")
def test_progress_never_changes_a_result() -> None:
    torch.manual_seed(0)
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(vocab_size=size, n_layers=1, d_model=16, context=48))
    texts, results = lines(3), []
    with redirect_stderr(io.StringIO()):
        for shown, callback in ((True, None), (False, None), (True, lambda done, total: None)):
            hw.progress(shown)
            scores = hw.importance(
                model, texts, method="ablation", tokenizer=TOKENIZER, on_progress=callback
            )
            results.append(scores.per_text)
    assert (results[0] == results[1]).all()
    assert (results[0] == results[2]).all()


def test_a_study_reads_so_many_texts_at_a_time() -> None:
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(vocab_size=size, n_layers=1, n_heads=2, d_model=16, context=48))
    texts, steps = ["a b c d", "b c a", "c c b a d", "d a", "a a b"], []

    def note(done: int, total: int) -> None:
        steps.append((done, total))

    known = hw.study(model, texts, tokenizer=TOKENIZER).table
    table = hw.study(model, texts, tokenizer=TOKENIZER, batch_size=2, on_progress=note).table
    assert steps == [(2, 5), (4, 5), (5, 5)]
    assert_tables_close(table, known, rtol=1e-5, atol=1e-6)
