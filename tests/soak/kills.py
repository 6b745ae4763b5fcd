"""Kill work at random moments with SIGKILL, and check that nothing is lost or wrong.

Run as `python tests/soak/kills.py KILLS RESULTS.json [VERB ...]`, with `tests` on the path; all
verbs if none is named. Each kill hits a
child of this process that works in a fresh copy of a folder with an old result. Afterwards the
folder must hold the old result or the new one; the same work, started again, must end with the
result of an undisturbed run to the last byte, and leave no other file.
"""

import hashlib
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
from typing import Any

import numpy as np
import torch

import headwise as hw
from children import exit_status, start_child
from headwise.corpora import Grammar
from headwise.jobs import RolesRequest
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, train
from headwise.lab import load as load_lab
from headwise.lab import save as save_lab
from headwise.models.checkpoints import _save
from headwise.recovery import _checkpoint as recovery
from headwise.scoring import _checkpoint
from studies import make_study

SCRATCH = ".headwise-"
_LATE = ("headwise", "pandas", "safetensors", "tokenizers", "torch", "transformers")
SETTINGS = TrainSettings(steps=24, batch_size=2, d_model=8, n_heads=2, n_layers=1, mlp_ratio=1)


@dataclass(frozen=True)
class Verb:
    """Work that writes results into a folder.

    Attributes:
        work: Writes the results; started again after a kill.
        read: The content of the results in a folder, through their loader; "" if there are none.
        old: Writes results that the work replaces.
    """

    work: Callable[[Path], object]
    read: Callable[[Path], str]
    old: Callable[[Path], object] = lambda folder: None


def _model(seed: int = 0) -> MiniGPT:
    torch.manual_seed(seed)
    config = MiniGPTConfig(len(Grammar().vocabulary), 40, 16, 4, n_layers=3, mlp_ratio=1)
    return MiniGPT(config).eval()


def _batches(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, 40, (4, 20), generator=rng)} for _ in range(4)]


def _train(folder: Path) -> None:
    train(SETTINGS, folder / "run", checkpoint_every=3, lines_judged=4)


def _read_lab(folder: Path) -> str:
    if not (folder / "headwise.json").exists():
        return ""
    load_lab(folder)
    return _digest(folder, "headwise.json", "model.safetensors", "tokenizer.json")


def _observe(folder: Path, seed: int = 0) -> None:
    model = _model()
    with hw.observe(model) as watch, torch.no_grad():
        for batch in _batches(seed):
            model(**batch)
    watch.table().save(folder / "table.json")


def _importance(folder: Path, seed: int = 0) -> None:
    options = {"method": "ablation", "loss": "lm", "resume": folder / "scores.part"}
    hw.importance(_model(seed), _batches(), **options).save(folder / "scores.csv")


def _prune(folder: Path, remove: tuple[int, ...] = (1, 2)) -> None:
    small = hw.prune(_model(), {1: list(remove)})
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)


def _recover(folder: Path, remove: tuple[int, ...] = (0, 3)) -> None:
    small, part = hw.prune(_model(), {0: list(remove)}), folder / "recovery.part"
    hw.recover(small, _model(), _batches(), steps=6, resume=part)
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)
    part.unlink()


def _texts(folder: Path) -> None:
    grammar, rng = Grammar(), np.random.default_rng(0)
    lines = [" ".join(grammar.line(rng).words) for _ in range(60)]
    (folder / "texts.txt").write_text("\n".join(lines))


def _corpus(folder: Path) -> None:
    options = {"out": folder / "run", "shards": 5, "tokenizer": _tokenizer()}
    job = hw.corpus(_model(), folder / "texts.txt", **options)
    job.run()
    job.merge().save(folder / "table.json")


def _roles(folder: Path) -> None:
    request = RolesRequest(evidence=hw.Evidence(nulls=("permuted",), models=1, splits=2))
    options = {"out": folder / "run", "shards": 3, "tokenizer": _tokenizer()}
    job = hw.corpus(_model(), folder / "texts.txt", request, **options)
    job.run()
    job.merge().save(folder / "roles.csv")


def _read_roles(folder: Path) -> str:
    if not (folder / "roles.csv").exists():
        return ""
    return _read_table(hw.Roles, folder, "roles.csv")


def _read_corpus(folder: Path) -> str:
    if not (folder / "table.json").exists():
        return ""
    shards = [f"run/{name}" for name in _files(folder / "run") if name.endswith(".parquet")]
    return _read_table(hw.HeadTable, folder, "table.json") + _digest(folder, *shards)


def _read_small(folder: Path) -> str:
    model = hw.load(folder)
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest() + _digest(folder, *os.listdir(folder))


def _tokenizer() -> Any:
    return make_tokenizer(Grammar().vocabulary)


def _page(folder: Path, heads: int) -> None:
    make_study(layers=6, heads=heads).report(folder / "report.html")


def _read_page(folder: Path) -> str:
    assert (folder / "report.html").read_text("utf-8").rstrip().endswith("</html>")
    return _digest(folder, "report.html")


def _read_table(kind: Any, folder: Path, name: str) -> str:
    return repr(kind.load(folder / name)) + _digest(folder, name)


def _digest(folder: Path, *names: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


VERBS = {
    "train": Verb(_train, lambda folder: _read_lab(folder / "run")),
    "save": Verb(
        lambda folder: save_lab(_model(1), _tokenizer(), folder),
        _read_lab,
        lambda folder: save_lab(_model(0), _tokenizer(), folder),
    ),
    "observe": Verb(
        _observe,
        lambda folder: _read_table(hw.HeadTable, folder, "table.json"),
        lambda folder: _observe(folder, seed=1),
    ),
    "importance": Verb(
        _importance,
        lambda folder: _read_table(hw.Scores, folder, "scores.csv"),
        lambda folder: _importance(folder, seed=1),
    ),
    "prune": Verb(
        _prune, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "recover": Verb(
        _recover, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "corpus": Verb(_corpus, _read_corpus, _texts),
    "roles of a corpus": Verb(_roles, _read_roles, _texts),
    "report": Verb(
        lambda folder: _page(folder, 12), _read_page, lambda folder: _page(folder, 8)
    ),
}  # fmt: skip


@dataclass
class Tally:
    """The outcomes of the kills of one verb."""

    kills: int = 0
    in_writes: int = 0
    old: int = 0
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
        left = self._read(folder)
        if left not in (self._old, self._new):
            raise ValueError("the folder holds neither the old result nor the new one")
        self.tally.new += left == self._new
        self.tally.old += left == self._old
        self._finish(self._verb.work, folder)
        if self._read(folder) != self._new:
            raise ValueError("the second run ended with another result")
        if _files(folder) != self._files:
            raise ValueError(f"left behind: {sorted(_files(folder) ^ self._files)}")

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


def main(kills: int, results: Path, *names: str) -> None:
    torch.set_num_threads(1)
    # The fresh process that opens a saved model takes seconds and writes no result.
    _save.check_fresh = lambda *_: None
    _checkpoint._SECONDS = 0.0  # so that unfinished scores are written after every head
    recovery._SECONDS = recovery._COMPUTE_PER_WRITE = 0.0  # and a recovery after every step
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(dir=results.parent) as place:
        verbs = {name: VERBS[name] for name in names or VERBS}
        killers = {name: Killer(verb, Path(place) / name, rng) for name, verb in verbs.items()}
        for attempt in range(20 * kills):
            if sum(killer.tally.kills for killer in killers.values()) == kills:
                break
            killer = min(killers.values(), key=lambda killer: killer.tally.kills)
            killer.kill(in_write=attempt % 2 == 0)
            tallies = {name: asdict(killer.tally) for name, killer in killers.items()}
            results.write_text(json.dumps(tallies, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
