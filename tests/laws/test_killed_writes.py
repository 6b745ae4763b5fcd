"""A killed write leaves the old or the new content whole; a failed one leaves the old alone."""

import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from headwise._tensors import write_tensors
from headwise.errors import OutputError
from headwise.files import files_beside, folder_beside, write_beside
from soak.kills import Killer
from soak.verbs import VERBS, Verb

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_writers_without_force_the_later_one_is_refused(kind: str, tmp_path: Path) -> None:
    def write(path: Path, text: str) -> None:
        (path if kind == "file" else path / "content").write_text(text)

    write_new = partial(write_beside if kind == "file" else folder_beside, force=False)
    target = tmp_path / "target"
    with pytest.raises(OutputError, match=rf"{target} exists: another process has written it"):  # noqa: PT012, SIM117
        with write_new(target) as later:
            write(later, "later")
            with write_new(target) as first:
                write(first, "first")
    content = target if kind == "file" else target / "content"
    assert content.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_folder_that_is_removed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"nowhere.*cannot be written"),
        write_beside(tmp_path / "nowhere" / "one.json"),
    ):
        raise AssertionError("the block has no file to write")


def test_files_have_the_mode_of_any_new_file(tmp_path: Path) -> None:
    """Writers of tensors make a temporary file that only its owner may read."""

    def write(path: Path) -> None:
        write_tensors({"x": torch.ones(2)}, path)

    (tmp_path / "files").mkdir()
    before = os.umask(0o027)
    try:
        with write_beside(tmp_path / "one") as file:
            write(file)
        with folder_beside(tmp_path / "folder", False) as folder:
            (folder / "inner").mkdir()
            write(folder / "inner" / "tensors")
            (folder / "tool").touch()
            (folder / "tool").chmod(0o700)
        with files_beside(tmp_path / "files", last="config") as files:
            write(files / "config")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes["one"] == modes["tensors"] == modes["config"] == 0o640
    assert (modes["tool"], modes["inner"]) == (0o740, 0o750)


def test_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    for name in ("a", "b", "other"):
        (tmp_path / name).write_text(f"old {name}")
    (tmp_path / "inner").mkdir()
    with files_beside(tmp_path, last="a") as new:
        for name in ("a", "b", "c"):
            (new / name).write_text(f"new {name}")
    files = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"a": "new a", "b": "new b", "c": "new c", "other": "old other"}
    assert (tmp_path / "inner").is_dir()


@pytest.mark.parametrize("name", ["a\0b", "half\ud800"])
def test_a_file_name_that_is_too_long(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot be written \("),
        folder_beside(tmp_path / name, False),
    ):
        raise AssertionError("unreachable")
    assert not any(tmp_path.iterdir())


# Work killed at random moments loses nothing: a sample of `make soak`.


TESTS = Path(__file__).parents[1]


@pytest.mark.full
def test_a_kill_of_each_verb_loses_nothing(tmp_path: Path) -> None:
    results = tmp_path / "kills.json"
    command = [sys.executable, str(TESTS / "soak" / "kills.py"), str(len(VERBS)), str(results)]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'models'}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    tallies = json.loads(results.read_text())
    assert not [tally["problems"] for tally in tallies.values() if tally["problems"]]
    assert {name: tally["kills"] for name, tally in tallies.items()} == dict.fromkeys(VERBS, 1)
    measured = json.loads((TESTS / "soak" / "results" / "kills.json").read_text())
    assert measured.keys() == VERBS.keys()  # the page lists the verbs that are killed
    assert sum(
        tally["old"] + tally["new"] + tally["unreadable"] for tally in tallies.values()
    ) == len(VERBS)


def _write_slowly(folder: Path) -> None:
    with (folder / "result").open("w") as file:
        for part in ("new ", "result"):
            file.write(part)
            file.flush()
            time.sleep(0.2)


def test_a_write_that_is_not_atomic_is_noticed(tmp_path: Path) -> None:
    verb = Verb(
        _write_slowly,
        lambda folder: (folder / "result").read_text(),
        lambda folder: (folder / "result").write_text("old result"),
    )
    killer = Killer(verb, tmp_path, random.Random(0))
    for _ in range(4):
        killer.kill(in_write=False)
    assert any("neither the old result nor the new" in text for text in killer.tally.problems)
