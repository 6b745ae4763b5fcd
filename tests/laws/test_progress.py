"""Progress is shown for long work alone, fits beside any label, and never changes a result."""

import errno
import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headwise as hw
from headwise import _progress
from headwise._progress import progress_bar, shows_progress
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.roles import Evidence
from planted import TOKENIZER, lines

PLAIN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    hw.progress(True)
    assert not _progress._bar_is_open
    assert set(threading.enumerate()) <= before


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "SECONDS_BEFORE_BAR", 0.0)
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", 0.02)
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_UPDATES", 0.01)


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def _shown(label: str = "Studying", seconds: float = 0.1, word: str = "reading") -> str:
    printed = io.StringIO()
    with redirect_stderr(printed), progress_bar(label) as on_progress:
        for done in range(1, 4):
            on_progress(done, 6, word)
            time.sleep(seconds / 3)
    return PLAIN.sub("", printed.getvalue())


@pytest.mark.usefixtures("_at_once", "_terminal")
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("label", ["short", "/a/very/long/path" * 20 + "/end", "\x1b[2J\n" * 40])
def test_a_bar_fits_beside_any_label(
    monkeypatch: pytest.MonkeyPatch, width: int, label: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = _shown(f"Studying {label}", word="")
    rows = [row for row in re.split(r"[\r\n]+", shown) if row.strip()]
    assert rows[-1].count("━") >= 5
    assert re.search(r"3/6, \d:\d\d left", rows[-1])
    assert max(map(len, rows)) <= width
    assert rows[-1].startswith("Studying" if width > 40 else "Stud")


@pytest.mark.usefixtures("_terminal")
def test_short_work_prints_nothing() -> None:
    assert _shown() == ""


@pytest.mark.usefixtures("_at_once")
def test_a_log_on_a_full_disk_does_not_stop_the_work() -> None:
    class Full(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    log = Full()
    with redirect_stderr(log), progress_bar("Studying") as on_progress:
        on_progress(1, 6)
        time.sleep(0.3)
    assert log.writes > 1


@pytest.mark.usefixtures("_at_once")
def test_a_pipe_gets_lines() -> None:
    rows = _shown("Studying\x1b[2J a\nmodel", 0.3).splitlines()
    assert 2 <= len(rows) <= 15
    assert re.fullmatch(r"Studying\ufffd\[2J a\ufffdmodel: 3/6 reading, \d:\d\d left", rows[-1])


def test_a_pipe_gets_nothing_in_the_first_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "SECONDS_BEFORE_BAR", 0.0)
    assert _progress.SECONDS_BETWEEN_LINES == 30
    assert _shown() == ""


@pytest.mark.usefixtures("_at_once")
def test_a_notebook_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def display(page: str, display_id: bool) -> Any:
        pages.append(page)
        return SimpleNamespace(update=pages.append)

    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    module = SimpleNamespace(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    assert _shown("<script>") == ""
    assert '<progress value="3" max="6"' in pages[-2]
    assert "&lt;script&gt;: 3/6 reading" in pages[-2]
    assert pages[-1] == ""
    assert "<script>" not in "".join(pages)


@pytest.mark.usefixtures("_at_once", "_terminal")
def test_bars_can_be_switched_off() -> None:
    hw.progress(False)
    assert _shown() == ""
    hw.progress(True)
    assert _shown() != ""


@pytest.mark.usefixtures("_at_once", "_terminal")
def test_a_bar_inside_another_shows_nothing() -> None:
    printed = io.StringIO()
    with redirect_stderr(printed), progress_bar("Outer") as on_progress:
        on_progress(1, 2)
        with progress_bar("Inner") as inner:
            inner(1, 3)
            time.sleep(0.05)
    assert "Outer" in printed.getvalue()
    assert "Inner" not in printed.getvalue()


@pytest.mark.usefixtures("_at_once", "_terminal")
def test_a_callback_replaces_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    @shows_progress("Working")
    def work(*, on_progress: Any = None) -> None:
        on_progress(1, 2)
        time.sleep(0.05)

    calls: list[tuple[int, int]] = []
    work(on_progress=lambda *steps: calls.append(steps))
    assert (calls, capsys.readouterr().err) == ([(1, 2)], "")
    work()
    assert "1/2" in capsys.readouterr().err


def test_a_new_stage_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_bar("Studying") as steps:
        for done, seconds in ((5, 100.0), (10, 200.0), (2, 204.0)):
            now = seconds
            steps(done, 10)
        assert steps.state() == "2/10, 0:16 left"


def test_passes_over_texts_are_one_progress() -> None:
    torch.manual_seed(0)
    size = len(TOKENIZER.get_vocab())
    model = MiniGPT(MiniGPTConfig(vocab_size=size, n_layers=1, d_model=16, context=48))
    calls: list[tuple[int, int]] = []
    evidence = Evidence(("permuted",), models=2, splits=1)
    hw.find_roles(
        model, TOKENIZER, lines(8), evidence=evidence, on_progress=lambda *now: calls.append(now)
    )
    done, total = zip(*calls, strict=True)
    assert set(total) == {3 * 8 + 4 * 100}  # texts, sequences and one contrast of the sequences
    assert list(done) == sorted(set(done))
    assert done[-1] == total[-1]


@pytest.mark.usefixtures("_at_once", "_terminal")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_bar(error: type[BaseException]) -> None:
    with redirect_stderr(io.StringIO()), pytest.raises(error), progress_bar("Failing"):
        raise error


@pytest.mark.usefixtures("_at_once", "_terminal")
def test_progress_never_changes_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_UPDATES", 0.1)
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
