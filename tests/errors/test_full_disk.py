"""A full disk or a read-only folder is an error with the path; the old result stays."""

import errno
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from folders import tiny_bert, tiny_llama
from headwise.caching import CachePlan, save_duo_attention
from headwise.corpora import Example, Grammar
from headwise.errors import OutputError
from headwise.files import _atomic
from headwise.lab import MiniGPT, MiniGPTConfig, TrainSettings, make_tokenizer, train
from headwise.lab import save as save_lab
from headwise.report import compare_tables
from headwise.surgery import Costs, LayerPlan, Plan
from headwise.tables import save_figure
from small_files import HEADS, SCORES
from studies import make_roles, make_study
from tables_of_texts import make_table
from tiers import tiers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
PLAN = CachePlan.of({1: [0]}, n_layers=9, n_kv_heads=2, window=4)
EACH = {"parameters": np.ones(3)}
STUDY = make_study(layers=2, heads=3)
SETTINGS = TrainSettings(steps=2, batch_size=2, d_model=6, n_heads=2, n_layers=1, mlp_ratio=1)


def _lab(path: Path) -> Path:
    torch.manual_seed(len(list(path.parent.iterdir())))
    vocabulary = Grammar().vocabulary
    model = MiniGPT(MiniGPTConfig(len(vocabulary), 7, 6, 2, n_layers=1))
    return save_lab(model, path, tokenizer=make_tokenizer(vocabulary))


def _heads(path: Path) -> Path:
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(60, context=24, d_model=12, n_heads=4, n_layers=1)).eval()
    examples = [Example([n % 7, 4, 5, 6], (3, 4), (0, 1), (1, 2)) for n in range(8)]
    return hw.find_heads(model, examples, evidence=hw.Evidence(nulls=())).save(path)


def _recover(path: Path) -> None:
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(60, context=24, d_model=12, n_heads=4, n_layers=1)).eval()
    batches = [{"input_ids": torch.tensor([[4, 5, 6]] * 4)}]
    hw.recover(hw.prune(model, {0: [1]}), model, batches, steps=2, resume=path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "table.parquet": STUDY.table.save,
    "table.csv": STUDY.table.save,
    "table.json": STUDY.table.save,
    "roles.parquet": make_roles(STUDY).save,
    "scores.csv": SCORES.save,
    "plan.json": Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason").save,
    "costs.json": Costs(HEADS, SCORES.kv_heads, EACH, EACH, "abc", {}).save,
    "cache.json": PLAN.save,
    "comparison.json": compare_tables(make_table(6), make_table(6, seed=1), draws=9).save,
    "heads.json": _heads,
    "pattern": lambda path: save_duo_attention(PLAN, path),
    "table.svg": lambda path: save_figure(STUDY.table.plot("entropy"), path),
    "study": lambda path: STUDY.save(path, force=True),
    "report.html": STUDY.report,
    "lab": _lab,
    "gguf": lambda path: hw.save(tiny_llama(), path, format="gguf", force=True),
    "onnx": lambda path: hw.save(tiny_bert(), path, format="onnx", force=True),
}
STARTED: dict[str, Callable[[Path], Any]] = {
    "run": lambda path: train(SETTINGS, path, lines_judged=1),
    "recovery.part": _recover,
}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only() -> Iterator[None]:
    """No file or folder can be made."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_atomic.tempfile, "mkdtemp", refuse)
        yield


def _content(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


TROUBLES = {full_disk: "Free some space there", read_only: r"\(Read-only file system\)"}


@pytest.mark.parametrize("name", tiers([x for x in WRITERS if x != "onnx"], ["onnx"]))
def test_the_old_result_stays(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    before = _content(tmp_path)
    assert before
    for trouble, said in TROUBLES.items():
        with (
            trouble(),
            pytest.raises(OutputError, match=rf"{name.split('.')[0]}.*{said}") as caught,
        ):
            WRITERS[name](tmp_path / name)
        assert len(str(caught.value).splitlines()) == 1
        assert _content(tmp_path) == before


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("name", STARTED)
def test_work_that_cannot_save_its_progress_stops(name: str, trouble: Any, tmp_path: Path) -> None:
    with trouble(), pytest.raises(OutputError, match=name.split(".")[0]):
        STARTED[name](tmp_path / name)
    assert not _content(tmp_path)
