"""A write killed at any step leaves the old or the new file whole; the next one cleans up."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise._tensors import write_tensors
from headwise.errors import OutputError
from headwise.files import _scratch, files_beside, folder_beside, write_beside

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")
WRITER = Path(__file__).parent / "killed_writer.py"


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [("file", "yes"), ("folder", "yes"), ("folder", "no"), ("files", "yes"), ("files", "no")],
)
def test_a_write_killed_at_any_step_leaves_a_whole_file(
    kind: str, exchange: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(WRITER), kind, exchange, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(WRITER.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_the_operating_system_exchanges_folders_atomically(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    assert _scratch.exchange(tmp_path / "one", tmp_path / "other") == sys.platform.startswith(
        "linux"
    )
    assert (tmp_path / "one" / "content").read_text() == "other"
    with pytest.raises(OSError, match="No such file"):
        _scratch.exchange(tmp_path / "one", tmp_path / "nowhere")


def test_cleaning_up_keeps_files_of_a_living_process(tmp_path: Path) -> None:
    with (
        write_beside(tmp_path / "one.json") as file,
        folder_beside(tmp_path / "folder", False) as folder,
    ):
        file.write_text("one")
        (folder / "content").write_text("mine")
        with write_beside(tmp_path / "other.json") as open_file:
            open_file.write_text("other")
        _scratch.sweep(tmp_path)
        assert file.read_text() == "one"
        assert (folder / "content").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.json", "other.json"]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock, another process takes the folder for a dead one's."""
    name = "mkdtemp" if moment == "before it is opened" else "_open_folder"
    module = _scratch.tempfile if name == "mkdtemp" else _scratch
    make, swept = getattr(module, name), []

    def make_and_sweep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if not swept:
            swept.append(made)
            _scratch.sweep(tmp_path)
            assert not [*tmp_path.iterdir()]
        return made

    monkeypatch.setattr(module, name, make_and_sweep)
    with write_beside(tmp_path / "one.json") as file:
        file.write_text("one")
    assert swept
    assert (tmp_path / "one.json").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_a_folder_that_is_removed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"nowhere.*cannot be written"),
        write_beside(tmp_path / "nowhere" / "one.json"),
    ):
        raise AssertionError("the block has no file to write")


def test_cleaning_up_keeps_files_of_others(tmp_path: Path) -> None:
    for name in (".headwise-00000000-abc.json", ".one-abc.json", "headwise-abc"):
        (tmp_path / name).write_text("theirs")
    (tmp_path / f"{_scratch.PREFIX}link").symlink_to(tmp_path / "headwise-abc")
    (tmp_path / f"{_scratch.PREFIX}dead.json").write_text("half")
    with write_beside(tmp_path / "one.json") as file:
        file.write_text("one")
    assert len(list(tmp_path.iterdir())) == 5
    assert not (tmp_path / f"{_scratch.PREFIX}dead.json").exists()


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


def test_files_are_synced_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(handle: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda *x: (steps.append("rename"), rename(*x)))
    monkeypatch.setattr(os, "replace", lambda *x: (steps.append("rename"), replace(*x)))
    with write_beside(tmp_path / "one.json") as file:
        file.write_text("one")
    assert steps == [f"sync {file.name}", "rename", f"sync {tmp_path.name}"]
    steps.clear()
    with folder_beside(tmp_path / "folder", force=False) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "content").write_text("mine")
    assert set(steps[:3]) == {"sync new", "sync inner", "sync content"}
    assert steps[3:] == ["rename", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("write", [write_beside, lambda path: folder_beside(path, force=False)])
def test_a_full_disk_is_an_output_error(write, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with write(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match=r"target cannot be written \(No space left on device\)"):
        fail(tmp_path / "target")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["plain", "with a folder", "working folder"])
def test_files_are_replaced_together_and_others_stay(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("a", "b", "other"):
        (target / name).write_text(f"old {name}")
    if kind == "with a folder":
        (target / "inner").mkdir()
    if kind == "working folder":
        monkeypatch.chdir(target)
    before = target.stat().st_ino
    with files_beside(target, last="a") as new:
        for name in ("a", "b", "c"):
            (new / name).write_text(f"new {name}")
    files = {path.name: path.read_text() for path in target.iterdir() if path.is_file()}
    assert files == {"a": "new a", "b": "new b", "c": "new c", "other": "old other"}
    # A folder that others use stays the same one.
    assert (target.stat().st_ino == before) == (kind != "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_equal_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("same")
    before = (tmp_path / "a").stat().st_ino
    with files_beside(tmp_path, last="a") as new:
        (new / "a").write_text("same")
    assert (tmp_path / "a").stat().st_ino == before


@pytest.mark.parametrize("name", ["a\0b", "half\ud800"])
def test_a_file_name_that_is_too_long(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot be written \("),
        folder_beside(tmp_path / name, False),
    ):
        raise AssertionError("unreachable")
    assert not any(tmp_path.iterdir())


def test_what_a_writer_leaves_beside_its_file_is_swept(tmp_path: Path) -> None:
    """A killed writer of safetensors leaves a temporary file of its own."""
    target = tmp_path / "one.safetensors"
    child = os.fork()
    if child == 0:
        with write_beside(target) as file:
            (file.parent / ".tmp-of-the-writer").write_text("half")
            os._exit(9)
    os.waitpid(child, 0)
    with write_beside(target) as file:
        file.write_text("one")
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]
