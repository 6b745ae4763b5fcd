"""A corpus job gives the same bytes however its shards are computed, and those of a plain watch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datatrove.executor import LocalPipelineExecutor

import headwise as hw
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.jobs import ImportanceRequest, merge_corpus
from headwise.tables import COLUMNS, HeadTable

TEXTS = random_texts(41)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "data.parquet", TEXTS)


def saved(table: HeadTable, path: Path) -> bytes:
    return table.save(path).read_bytes()


def check_equal(table: HeadTable, expected: HeadTable) -> None:
    """Counts exactly, sums to rounding."""
    assert table.heads == expected.heads
    assert table.model == expected.model
    for name in expected.statistics:
        for column in COLUMNS:
            ours, theirs = (getattr(t.totals[name], column) for t in (table, expected))
            if column in ("count", "texts", "count_squared"):
                np.testing.assert_array_equal(ours, theirs)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def watch_plainly(model: Path, texts: list[str], request: hw.Request) -> HeadTable:
    """One text after the other, without batches."""
    tokenizer, opened = hw.load_tokenizer(model), hw.load(model)
    with torch.no_grad(), hw.observe(opened, request) as watch:
        for text in texts:
            opened(**tokenizer(text, return_tensors="pt"))
    return watch.table()


def test_merged_shards_equal_a_plain_watch(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=5)
    for shard in (3, 0, 4, 1, 2):
        job.run(shard=shard)
    check_equal(job.merge(), watch_plainly(model, TEXTS, hw.Request()))


def test_every_kind_of_file_gives_the_same_table(model: Path, data: Path, tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / "data.jsonl", TEXTS),
        write_texts(tmp_path / "lines.txt", TEXTS),
        write_texts(tmp_path / "blank-lines.txt", TEXTS, "\n\n"),
    ]
    expected = watch_plainly(model, TEXTS, hw.Request())
    for path in files:
        job = hw.corpus(model, path, out=tmp_path / f"run-{path.name}", shards=4)
        job.run()
        check_equal(job.merge(), expected)


def test_merging_needs_no_model(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=2)
    job.run()
    table = merge_corpus(tmp_path / "run")
    assert saved(table, tmp_path / "a.parquet") == saved(job.merge(), tmp_path / "b.parquet")


def test_finished_shards_are_not_computed_again(model: Path, data: Path, tmp_path: Path) -> None:
    hw.corpus(model, data, out=tmp_path / "run", shards=3).run(shard=1)
    written = (tmp_path / "run/shards/00001.parquet").stat().st_mtime_ns
    job = hw.corpus(model, data, out=tmp_path / "run")
    assert (job.shards, job.unfinished()) == (3, [0, 2])
    done: list[tuple[int, int]] = []
    job.run(on_progress=lambda *counts: done.append(counts))
    job.run(shard=1)
    assert done == [(2, 3), (3, 3)]
    assert (tmp_path / "run/shards/00001.parquet").stat().st_mtime_ns == written
    assert repr(job) == f"CorpusJob in {tmp_path / 'run'}: 3 of 3 shards finished"


def test_empty_texts_and_empty_shards_add_nothing(model: Path, tmp_path: Path) -> None:
    texts = ["w1 w2 w3", "", " \t", None, "w4 w5"]
    path = write_parquet(tmp_path / "data.parquet", [*texts, *[""] * 20])
    empty = tmp_path / "data.jsonl"
    empty.touch()
    job = hw.corpus(model, [path, empty], out=tmp_path / "run", shards=9)
    job.run()
    check_equal(job.merge(), watch_plainly(model, ["w1 w2 w3", "w4 w5"], hw.Request()))


def test_sums_of_each_text_are_kept_on_request(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, hw.Request(per_text=True), out=tmp_path / "run", shards=4)
    job.run()
    plain = watch_plainly(model, TEXTS, hw.Request(per_text=True))
    ours, theirs = (t.per_text("entropy").total for t in (job.merge(), plain))
    assert ours.shape == theirs.shape == (41, 6)
    np.testing.assert_allclose(np.sort(ours, 0), np.sort(theirs, 0), rtol=1e-4)


def test_long_texts_are_split_as_in_a_study(model: Path, tmp_path: Path) -> None:
    texts = [" ".join(random_texts(9)), "w1 w2 w3"]
    job = hw.corpus(
        model, write_texts(tmp_path / "a.txt", texts), out=tmp_path / "run", shards=1, max_tokens=17
    )
    job.run()
    study = hw.study(
        hw.load(model), hw.load_tokenizer(model), texts, request=hw.Request(), max_tokens=17
    )
    check_equal(job.merge(), study.table)


def test_importance_of_shards_is_that_of_all_texts(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, ImportanceRequest(), out=tmp_path / "run", shards=4)
    job.run()
    scores = job.merge()
    opened, tokenizer = hw.load(model), hw.load_tokenizer(model)
    expected = hw.importance(opened, TEXTS, tokenizer=tokenizer)
    assert scores.heads == expected.heads
    assert (scores.method, scores.loss, scores.model) == ("half-gate", "lm", expected.model)
    ours, theirs = (np.sort(s.per_text, 0) for s in (scores, expected))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    merged = merge_corpus(tmp_path / "run")
    assert np.array_equal(merged.per_text, scores.per_text)


@pytest.mark.parametrize("name", ["datasets:{}", "datasets:{}:train"])
def test_a_dataset_is_streamed(name: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for part in range(3):
        write_parquet(folder / f"train-{part}.parquet", TEXTS[part::3])
    job = hw.corpus(model, name.format(folder), out=tmp_path / "run")
    assert job.shards == 3
    job.run()
    check_equal(job.merge(), watch_plainly(model, TEXTS, hw.Request()))


def test_files_are_dealt_out_where_there_are_enough(model: Path, tmp_path: Path) -> None:
    for part in range(4):
        write_texts(tmp_path / f"{part}.txt", TEXTS[part::4])
    job = hw.corpus(model, tmp_path / "*.txt", out=tmp_path / "run", shards=3)
    assert [*job.source.texts(0, 3)] == TEXTS[0::4] + TEXTS[3::4]
    for shard in (2, 0, 1):
        job.run(shard=shard)
    check_equal(job.merge(), watch_plainly(model, TEXTS, hw.Request()))


def test_the_bytes_do_not_depend_on_who_computes_a_shard(
    model: Path, data: Path, tmp_path: Path
) -> None:
    tables = []
    for name, order in (("one", [None]), ("two", [2, 0, 1])):
        for shard in order:
            hw.corpus(model, data, out=tmp_path / name, shards=3).run(shard=shard)
        tables.append(saved(merge_corpus(tmp_path / name), tmp_path / f"{name}.parquet"))
    assert tables[0] == tables[1]


def test_an_executor_of_datatrove_runs_the_shards(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=3)

    def measure(documents: object, rank: int = 0, world_size: int = 1) -> tuple[()]:
        job.run(shard=rank)
        return ()

    LocalPipelineExecutor(
        [measure], tasks=job.shards, workers=1, logging_dir=str(tmp_path / "logs")
    ).run()
    check_equal(job.merge(), watch_plainly(model, TEXTS, hw.Request()))
