"""Die at every step of a write in turn, in children of this process, and check what is left.

Run as `python killed_writer.py file|folder|files PLACE`; prints the number of steps. A
step is a line of the code that writes, or an event that Python's audit hooks report, such as a
deletion inside `shutil.rmtree`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from children import exit_status, start_child
from headwise.errors import InputError, OutputError
from headwise.files import _atomic as files

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
    return str({p.name: p.read_text() for p in paths if not p.name.startswith(files.PREFIX)})


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
        if event == "line" and frame.f_code.co_filename == files.__file__:
            count()
        return trace

    def audit(event: str, _: object) -> None:
        if event.startswith(("os.", "shutil.", "tempfile.", "open")):
            count()

    sys.addaudithook(audit)
    sys.settrace(trace)


def restore(place: Path) -> bool:
    """Run the line by which a moved folder is restored, as reading and writing it say."""
    lines = set()
    for attempt, kind in (
        (lambda: files.check_not_moved(place / "target", "load"), InputError),
        (lambda: write_folder(place, NEW), OutputError),
    ):
        try:
            attempt()
        except kind as error:
            lines.add(str(error).rpartition("Restore it: ")[2])
    (line,) = lines
    return subprocess.run(line, shell=True).returncode == 0


def main(kind: str, place: Path) -> int:
    write, read = {
        "file": (write_file, read_file),
        "folder": (write_folder, read_folder),
        "files": (write_files, read_folder),
    }[kind]
    replaced = str(OLD | NEW if kind == "files" else NEW)
    name = "target.json" if kind == "file" else "target"

    def killed(step: int) -> None:
        die_at(step)
        write(place, NEW)

    step = moved = 0
    while True:
        step += 1
        write(place, OLD)
        status = exit_status(start_child(lambda step=step: killed(step)))
        if kind == "folder" and not (place / name).exists():
            assert restore(place)
            moved += 1
        elif kind == "files" and not (place / name / "a").exists():
            moved += 1  # what is not there is not read
        else:
            assert read(place) in (str(OLD), replaced), (step, read(place))
        # The next write in the same folder cleans up.
        assert exit_status(start_child(lambda: write(place, NEW))) == 0
        assert read(place) == (replaced if kind != "files" else read(place)), step
        leftover = {path.name for path in place.iterdir()} - {name}
        assert not leftover, (step, leftover)
        if status == 0:
            assert read(place) == replaced
            assert (moved == 0) == (kind == "file")
            return step
        assert status == 9, (step, status)


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2])))
