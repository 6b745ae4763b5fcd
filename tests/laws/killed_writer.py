"""Die at every step of a write in turn, in children of this process, and check what is left.

Run as `python killed_writer.py file|folder|files EXCHANGE PLACE`; prints the number of steps. A
step is a line of the code that writes, or an event that Python's audit hooks report, such as a
deletion inside `shutil.rmtree`.
"""

import os
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from children import exit_status, start_child
from headwise.files import _atomic as files
from headwise.files import _scratch

SOURCES = (files.__file__, _scratch.__file__)
OLD, NEW = {"a": "old a", "b": "old b"}, {"a": "new a", "c": "new c"}


def write_file(place: Path, content: dict[str, str]) -> None:
    with files.write_beside(place / "target.json") as beside:
        beside.write_text(str(content))


def write_folder(place: Path, content: dict[str, str]) -> None:
    with files.folder_beside(place / "target", force=True) as beside:
        for name, text in content.items():
            (beside / name).write_text(text)


def write_files(place: Path, content: dict[str, str]) -> None:
    (place / "target").mkdir(exist_ok=True)
    if content is OLD:
        shutil.rmtree(place / "target")
        (place / "target").mkdir()
    with files.files_beside(place / "target", last="a") as beside:
        for name, text in content.items():
            (beside / name).write_text(text)


def read_file(place: Path) -> Any:
    path = place / "target.json"
    return path.read_text() if path.exists() else None


def read_folder(place: Path) -> Any:
    folder = place / "target"
    paths = sorted(folder.iterdir()) if folder.exists() else []
    return str({p.name: p.read_text() for p in paths if not p.name.startswith(_scratch.PREFIX)})


def die_at(step: int) -> None:
    """End this process as a kill would, at the given step of the write."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            os._exit(9)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        # Helpers of the standard library are traced by their audit events alone.
        if event == "line" and frame.f_code.co_filename in SOURCES:
            count()
        return trace

    def audit(event: str, _: object) -> None:
        if event.startswith(("os.", "shutil.", "tempfile.", "fcntl.", "open", "ctypes.call")):
            count()

    sys.addaudithook(audit)
    sys.settrace(trace)


def main(kind: str, exchange: str, place: Path) -> int:
    write, read = {
        "file": (write_file, read_file),
        "folder": (write_folder, read_folder),
        "files": (write_files, read_folder),
    }[kind]
    replaced = str(OLD | NEW if kind == "files" else NEW)
    if exchange == "no":
        _scratch.exchange = lambda *_: False
    name = "target.json" if kind == "file" else "target"

    def killed(step: int) -> None:
        die_at(step)
        write(place, NEW)

    step = 0
    while True:
        step += 1
        write(place, OLD)
        status = exit_status(start_child(lambda step=step: killed(step)))
        between = exchange == "no" and not (place / name).exists()
        assert between or read(place) in (str(OLD), replaced), (step, read(place))
        # A write to another target in the same folder cleans up and restores what was there.
        assert exit_status(start_child(lambda: write_file_of_another(place))) == 0
        assert read(place) in (str(OLD), replaced), (step, "after the sweep", read(place))
        leftover = {path.name for path in place.iterdir()} - {name, "another.json"}
        assert not leftover, (step, leftover)
        if status == 0:
            assert read(place) == replaced
            return step
        assert status == 9, (step, status)


def write_file_of_another(place: Path) -> None:
    with files.write_beside(place / "another.json") as beside:
        beside.write_text("{}")


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
