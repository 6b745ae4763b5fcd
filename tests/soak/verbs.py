"""The work that is killed at random moments: verbs that write results, and how these are read.

They are a sample that writes in every way: a file, a folder, files one by one, and unfinished work.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise import _checkpoint
from headwise.checkpoints import _save
from headwise.corpora import Grammar
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, train
from headwise.lab import save as save_lab
from studies import make_study

SETTINGS = TrainSettings(steps=24, batch_size=2, d_model=8, n_heads=2, n_layers=1, mlp_ratio=1)


@dataclass(frozen=True)
class Verb:
    """Work that writes results into a folder.

    Attributes:
        work: Writes the results; started again after a kill.
        read: The content of the results in a folder, through their loader; "" if there are none.
        old: Writes results that the work replaces.
        named_by: A file without which the others of a folder are not read, if they are replaced
            one by one.
    """

    work: Callable[[Path], object]
    read: Callable[[Path], str]
    old: Callable[[Path], object] = lambda folder: None
    named_by: str = ""


def _model(seed: int = 0) -> MiniGPT:
    torch.manual_seed(seed)
    config = MiniGPTConfig(len(Grammar().vocabulary), 40, 16, 4, n_layers=3, mlp_ratio=1)
    return MiniGPT(config).eval()


def _batches(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, 40, (4, 20), generator=rng)} for _ in range(4)]


def _train(folder: Path) -> None:
    train(SETTINGS, folder / "run", lines_judged=4)


def _read_lab(folder: Path) -> str:
    if not (folder / "headwise.json").exists():
        return ""
    hw.load(folder), hw.load_tokenizer(folder)
    return _digest(folder, "headwise.json", "model.safetensors", "tokenizer.json")


def _observe(folder: Path, seed: int = 0) -> None:
    model = _model()
    with hw.observe(model) as watch, torch.no_grad():
        for batch in _batches(seed):
            model(**batch)
    watch.table().save(folder / "table.json")


def _prune(folder: Path, remove: tuple[int, ...] = (1, 2)) -> None:
    small = hw.prune(_model(), {1: list(remove)})
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)


def _recover(folder: Path, remove: tuple[int, ...] = (0, 3)) -> None:
    small, part = hw.prune(_model(), {0: list(remove)}), folder / "recovery.part"
    hw.recover(small, _model(), _batches(), steps=6, resume=part)
    hw.save(small, folder / "small", tokenizer=_tokenizer(), force=True)
    part.unlink()


def _read_small(folder: Path) -> str:
    model = hw.load(folder)
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest() + _digest(folder, *os.listdir(folder))


def _tokenizer() -> Any:
    return make_tokenizer(Grammar().vocabulary)


def _study(folder: Path, heads: int = 3) -> None:
    make_study(layers=2, heads=heads).save(folder / "study", force=True)


def _read_study(folder: Path) -> str:
    return repr(hw.load_study(folder)) + _digest(folder, *os.listdir(folder))


def _digest(folder: Path, *names: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()


VERBS = {
    "train": Verb(_train, lambda folder: _read_lab(folder / "run"), named_by="headwise.json"),
    "save": Verb(
        lambda folder: save_lab(_model(1), folder, tokenizer=_tokenizer()),
        _read_lab,
        lambda folder: save_lab(_model(0), folder, tokenizer=_tokenizer()),
        named_by="headwise.json",
    ),
    "observe": Verb(
        _observe,
        lambda folder: (
            repr(hw.HeadTable.load(folder / "table.json")) + _digest(folder, "table.json")
        ),
        lambda folder: _observe(folder, seed=1),
    ),
    "prune": Verb(
        _prune, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "recover": Verb(
        _recover, lambda folder: _read_small(folder / "small"), lambda folder: _prune(folder, (0,))
    ),
    "study": Verb(_study, lambda folder: _read_study(folder / "study"), lambda f: _study(f, 2)),
}


def write_often(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let work write its state at every step, and skip the check of saved models.

    The fresh process that opens a saved model takes seconds and writes no result.
    """
    set_attribute(_save, "check_fresh", lambda *_: None)
    set_attribute(_checkpoint, "_SECONDS", 0.0)
    set_attribute(_checkpoint, "_COMPUTE_PER_WRITE", 0.0)
