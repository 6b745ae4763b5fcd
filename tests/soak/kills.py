"""Kill work at random moments with SIGKILL, and check that nothing is lost or wrong.

Run as `python tests/soak/kills.py KILLS RESULTS.json`, with `tests` on the path. Each kill hits a
child of this process that works in a fresh copy of a folder with an old result. Afterwards the
folder must hold the old result or the new one; the same work, started again, must end with the
result of an undisturbed run to the last byte, and leave no other file.
"""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from children import exit_status, start_child
from soak.verbs import VERBS, Verb, write_often

SCRATCH = ".headwise-"
_MOVED, _UNREADABLE = ".headwise-old", "unreadable"
_LATE = ("headwise", "pandas", "safetensors", "tokenizers", "torch", "transformers")


@dataclass
class Tally:
    """The outcomes of the kills of one verb."""

    kills: int = 0
    in_writes: int = 0
    old: int = 0
    unreadable: int = 0
    new: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Killer:
    """Kills one verb again and again."""

    def __init__(self, verb: Verb, place: Path, rng: random.Random) -> None:
        self._verb, self._place, self._rng = verb, place, rng
        self.tally = Tally()
        start = place / "start"
        start.mkdir(parents=True)
        _import_modules_of(verb, place)
        self._finish(verb.old, start)
        self._old = self._read(start)
        done = self._copy()
        started = time.perf_counter()
        self._finish(verb.work, done)
        self.tally.seconds = time.perf_counter() - started
        self._new, self._files = self._read(done), _files(done)
        assert self._new != self._old

    def kill(self, in_write: bool) -> bool:
        """Kill one run and check what is left; False if the run ended before."""
        folder = self._copy()
        child = start_child(lambda: self._verb.work(folder))
        time.sleep(self._rng.random() * self.tally.seconds)
        if in_write:
            _wait_for_scratch(folder, child, self.tally.seconds)
            time.sleep(self._rng.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        if exit_status(child) != -signal.SIGKILL:
            return False
        self.tally.kills += 1
        self.tally.in_writes += any(SCRATCH in name for name in _files(folder))
        try:
            self._check(folder)
        except Exception as error:
            self.tally.problems.append(f"{type(error).__name__}: {error}"[:500])
        return True

    def _check(self, folder: Path) -> None:
        _restore_moved(folder)
        left = self._read_left(folder)
        if left not in (self._old, self._new, _UNREADABLE):
            raise ValueError("the folder holds neither the old result nor the new one")
        self.tally.new += left == self._new
        self.tally.old += left == self._old
        self.tally.unreadable += left == _UNREADABLE
        self._finish(self._verb.work, folder)
        if self._read(folder) != self._new:
            raise ValueError("the second run ended with another result")
        left_behind = {name for name in _files(folder) if SCRATCH not in name} ^ self._files
        if left_behind:
            raise ValueError(f"left behind: {sorted(left_behind)}")

    def _read_left(self, folder: Path) -> str:
        """What a kill has left. Files of a folder that are replaced one by one are not read while
        the one that names them is away."""
        name = self._verb.named_by
        return _UNREADABLE if name and not list(folder.rglob(name)) else self._read(folder)

    def _copy(self) -> Path:
        folder = self._place / "work" / "results"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(self._place / "start", folder)
        return folder

    def _finish(self, work: Callable[[Path], object], folder: Path) -> None:
        status = exit_status(start_child(lambda: work(folder)))
        if status:
            raise RuntimeError(f"the run ended with {status}")

    def _read(self, folder: Path) -> str:
        """What the loader reads, in a process of its own."""
        out = self._place / "read"
        self._finish(lambda folder: out.write_text(self._verb.read(folder)), folder)
        return out.read_text()


def _restore_moved(folder: Path) -> None:
    """Give a folder that was being replaced its name again, as docs/nothing-lost.md says."""
    for old in folder.rglob(f"*{_MOVED}"):
        target = old.with_name(old.name.removesuffix(_MOVED))
        if not target.exists():
            old.rename(target)


def _import_modules_of(verb: Verb, place: Path) -> None:
    """Import here what the work imports late, so that each child need not.

    Only imports: after a backward pass a process cannot be forked for another one.
    """

    def work() -> None:
        (place / "trial").mkdir()
        for step in (verb.old, verb.work, verb.read):
            step(place / "trial")
        names = (name for name in sys.modules if name.split(".")[0] in _LATE)
        (place / "modules").write_text("\n".join(names))

    exit_status(start_child(work))
    for name in (place / "modules").read_text().split():
        with suppress(ImportError, AttributeError):
            importlib.import_module(name)


def _wait_for_scratch(folder: Path, child: int, seconds: float) -> None:
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end and os.path.exists(f"/proc/{child}/exe"):
        if any(SCRATCH in name for name in _files(folder.parent)):
            return
        time.sleep(0.0003)


def _files(folder: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(path, name), folder)
        for path, folders, names in os.walk(folder)
        for name in (*names, *folders)
    }


def main(kills: int, results: Path) -> None:
    torch.set_num_threads(1)
    write_often(setattr)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir=results.parent) as place:
        killers = {name: Killer(verb, Path(place) / name, rng) for name, verb in VERBS.items()}
        for attempt in range(20 * kills):
            if sum(killer.tally.kills for killer in killers.values()) == kills:
                break
            killer = min(killers.values(), key=lambda killer: killer.tally.kills)
            killer.kill(in_write=attempt % 2 == 0)
            tallies = {name: asdict(killer.tally) for name, killer in killers.items()}
            results.write_text(json.dumps(tallies, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
