"""Documents of a datatrove pipeline give the table of a plain watch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor

import headwise as hw
from corpus_files import random_texts, write_model
from headwise.errors import ArgumentError, InputError
from headwise.jobs import merge_corpus
from headwise.jobs.datatrove import WatchHeads

TEXTS = random_texts(10)


def read_every_third(data: object, rank: int = 0, world_size: int = 1) -> Any:
    """A reader: rank `i` of `n` reads every n-th text."""
    for number in range(rank, len(TEXTS), world_size):
        yield Document(text=TEXTS[number], id=str(number))


def note_ids(folder: Path) -> Any:
    def note(data: Any, rank: int = 0, world_size: int = 1) -> Any:
        (folder / f"{rank}.json").write_text(json.dumps([document.id for document in data]))
        return ()

    return note


def run(model: Path, folder: Path, tasks: int, logs: str) -> None:
    (folder / "ids").mkdir(exist_ok=True)
    pipeline = [
        read_every_third,
        WatchHeads(model, folder / "run", keep=True),
        note_ids(folder / "ids"),
    ]
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(folder / logs)).run()


def test_a_pipeline_computes_the_shards_of_a_job(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    run(model, tmp_path, tasks=3, logs="logs")
    table = merge_corpus(tmp_path / "run")
    tokenizer, opened = hw.load_tokenizer(model), hw.load(model)
    with torch.no_grad(), hw.observe(opened) as watch:
        for text in TEXTS:
            opened(**tokenizer(text, return_tensors="pt"))
    expected = watch.table()
    assert table.model == expected.model
    for name in expected.statistics:
        assert (table.count(name) == expected.count(name)).all()
        assert table.mean(name) == pytest.approx(expected.mean(name), rel=1e-5, nan_ok=True)
    ids = [json.loads((tmp_path / f"ids/{rank}.json").read_text()) for rank in range(3)]
    assert ids == [["0", "3", "6", "9"], ["1", "4", "7"], ["2", "5", "8"]]
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    run(model, tmp_path, tasks=3, logs="again")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*.*")} == written
    with pytest.raises(InputError, match="another job: its shards is 3, not 2"):
        list(WatchHeads(model, tmp_path / "run").run(read_every_third(None), 0, 2))


def test_documents_are_dropped_unless_they_are_passed_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    for keep, count in ((False, 0), (True, 10)):
        step = WatchHeads(model, tmp_path / "run", keep=keep)
        assert len(list(step.run(read_every_third(None)))) == count


def test_a_pipeline_without_a_reader(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rank 4 gets no documents"):
        list(WatchHeads("model", tmp_path / "run").run(None, 4, 5))
