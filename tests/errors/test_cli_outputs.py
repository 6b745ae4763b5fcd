"""An output that cannot be written is refused before the work begins, and nothing is lost."""

import errno
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from command import headwise
from headwise.files import _atomic

# A command line up to its output, and the ending of the output. The model does not exist: if the
# work had begun, the error would name it.
FILES = {
    "observe": ("observe ./any --text good.txt -o", ".csv"),
    "importance": ("importance ./any --text good.txt -o", ".parquet"),
    "effects": ("effects ./any --examples good.txt -o", ".csv"),
    "effects --figure": ("effects ./any --examples good.txt --figure", ".svg"),
    "roles": ("roles ./any --text good.txt -o", ".json"),
    "heads": ("heads ./any --examples good.txt -o", ".json"),
    "heads --vllm-hook": ("heads ./any --examples good.txt --vllm-hook", ".json"),
    "heads --qrhead": ("heads ./any --examples good.txt --qrhead", ".yaml"),
    "heads --save-examples": ("heads ./any --task needle --save-examples", ".jsonl"),
    "compare": ("compare ./any ./any --text good.txt -o", ".json"),
    "cache": ("cache ./any --text good.txt -o", ".json"),
    "look": ("look ./any words -o", ".html"),
    "report": ("report ./any --text good.txt -o", ".html"),
    "report of the Mini-GPT": ("report --lab-folder ./any -o", ".html"),
    "observe --figure": ("observe ./any --text good.txt --figure", ".svg"),
    "prune --figure": ("prune ./any --by no.csv --remove 0.3 -o out --figure", ".png"),
}
FOLDERS = {
    "prune": "prune ./any --by no.csv --remove 0.3 -o",
    "report --save": "report ./any --text good.txt --save",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.txt").write_text("I work\n", "utf-8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine", "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_atomic.tempfile, "mkdtemp", refuse)


def _refused(place: Path, line: str) -> str:
    """The one line of a command that fails and leaves everything as it was."""
    before = sorted(place.rglob("*"))
    done = headwise(*line.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    assert sorted(place.rglob("*")) == before
    return done.err


@pytest.mark.parametrize(("name", "force"), [*zip(FILES, cycle(["", "--force"]), strict=False)])
def test_a_file_that_cannot_be_written(place: Path, name: str, force: str) -> None:
    line, ending = FILES[name]
    (place / f"folder{ending}").mkdir()
    for path, message in (
        (f"folder{ending}", f"folder{ending} is a folder. Name a file in it."),
        (f"missing/x{ending}", f"missing/x{ending} cannot be written (No such file or directory)"),
        (f"good.txt/x{ending}", f"good.txt/x{ending} cannot be written (Not a directory)"),
        ("x.gif", "x.gif does not end in "),
    ):
        assert message in _refused(place, f"{line} {path} {force}")


@pytest.mark.parametrize(("name", "force"), [*zip(FOLDERS, cycle(["", "--force"]), strict=False)])
def test_a_folder_that_cannot_be_written(place: Path, name: str, force: str) -> None:
    for path, message in (
        ("good.txt", "good.txt is the input" if "good" in FOLDERS[name] else "good.txt is a file."),
        ("full/mine", "output: full/mine is a file. Name a folder."),
        ("full/mine/x", "full/mine/x cannot be written (Not a directory)"),
        ("full/mine/x/y", "full/mine/x/y cannot be written (Not a directory)"),
    ):
        assert message in _refused(place, f"{FOLDERS[name]} {path} {force}")
    if not force:
        assert "full already exists. Add --force" in _refused(place, f"{FOLDERS[name]} full")


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_place_that_may_not_be_written_to(place: Path, name: str) -> None:
    line, ending = FILES[name] if name in FILES else (FOLDERS[name], "")
    error = _refused(place, f"{line} new{ending}")
    assert " cannot be written (Read-only file system)" in error


@pytest.mark.parametrize("name", ["prune", "report --save"])
def test_force_replaces_no_files_of_other_origin(place: Path, name: str) -> None:
    error = _refused(place, f"{FOLDERS[name]} full --force")
    assert "output: full holds mine, which headwise did not write and would delete." in error
    (place / "full" / ("study.json" if name == "report --save" else "config.json")).touch()
    assert "holds mine" not in _refused(place, f"{FOLDERS[name]} full --force")


@pytest.mark.usefixtures("read_only")
def test_training_does_not_begin_where_it_cannot_save(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.lab._train.TrainingRun.advance", lambda _: 1 / 0)
    (place / "lab").mkdir()
    assert "cannot be written (Read-only file system)" in _refused(place, "train --out lab")
