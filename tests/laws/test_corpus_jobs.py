"""A corpus job gives the same bytes however its shards are computed, and those of a plain watch."""

import gc
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import headwise as hw
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.errors import InputError, OutputError
from headwise.files import claim
from headwise.files._atomic import PREFIX
from headwise.jobs import CorpusJob, ImportanceRequest, merge_corpus
from headwise.tables import COLUMNS, HeadTable
from headwise.watch import Watch

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
        write_texts(tmp_path / "paragraphs.txt", TEXTS, "\n\n"),
    ]
    expected = watch_plainly(model, TEXTS, hw.Request())
    for path in files:
        job = hw.corpus(model, path, out=tmp_path / f"run-{path.name}", shards=4)
        job.run()
        check_equal(job.merge(), expected)


@pytest.mark.full
def test_any_number_of_workers_gives_the_same_bytes(
    model: Path, data: Path, tmp_path: Path
) -> None:
    check_workers(model, data, tmp_path, (1, 2, 5))


@pytest.mark.full
def test_two_workers_give_the_bytes_of_one(model: Path, data: Path, tmp_path: Path) -> None:
    check_workers(model, data, tmp_path, (1, 2))


def check_workers(model: Path, data: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    merged = set()
    for workers in numbers:
        job = hw.corpus(model, data, out=tmp_path / f"run{workers}", shards=6)
        job.run(workers=workers)
        merged.add(saved(job.merge(), tmp_path / f"{workers}.parquet"))
    assert len(merged) == 1


@pytest.mark.full
def test_a_model_in_memory_is_sent_to_workers(model: Path, data: Path, tmp_path: Path) -> None:
    opened, tokenizer = hw.load(model), hw.load_tokenizer(model)
    job = hw.corpus(opened, data, out=tmp_path / "memory", shards=3, tokenizer=tokenizer)
    job.run(workers=2)
    other = hw.corpus(model, data, out=tmp_path / "folder", shards=3)
    other.run()
    assert saved(job.merge(), tmp_path / "a.parquet") == saved(
        other.merge(), tmp_path / "b.parquet"
    )


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


def test_garbage_of_each_shard_is_collected_without_a_search_of_libraries(
    model: Path, data: Path, tmp_path: Path
) -> None:
    def n_watches() -> int:
        return sum(type(x) is Watch for x in gc.get_objects())

    gc.collect()
    before, alive, frozen = n_watches(), list[int](), list[int]()  # other tests may hold some

    def on_progress(done: int, total: int) -> None:
        alive.append(n_watches())

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:  # to count what is frozen takes a walk over all of it
            frozen.append(gc.get_freeze_count())

    gc.callbacks.append(on_collection)
    try:
        hw.corpus(model, data, out=tmp_path / "run", shards=3).run(on_progress=on_progress)
    finally:
        gc.callbacks.remove(on_collection)
    assert alive == [before] * 3
    assert max(frozen) > len(gc.get_objects()) // 2
    assert gc.get_freeze_count() == 0


def test_what_killed_processes_left_is_deleted(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=2)
    job.run()
    for name in (".job.lock", ".model.lock", "shards/.00000.lock"):
        (tmp_path / "run" / name).touch()
    dead = tmp_path / f"run/shards/{PREFIX}{2**22 + 1}-dead/new"  # more than the largest process id
    dead.mkdir(parents=True)
    job.run()
    assert not list((tmp_path / "run").rglob(".*"))


def test_empty_texts_and_empty_shards_add_nothing(model: Path, tmp_path: Path) -> None:
    texts = ["w1 w2 w3", "", " \t", None, "w4 w5"]
    path = write_parquet(tmp_path / "data.parquet", [*texts, *[""] * 20])
    empty = tmp_path / "data.jsonl"
    empty.touch()
    job = hw.corpus(model, [path, empty], out=tmp_path / "run", shards=9)
    job.run()
    check_equal(job.merge(), watch_plainly(model, ["w1 w2 w3", "w4 w5"], hw.Request()))
    records = [json.loads(p.read_text()) for p in sorted((tmp_path / "run/shards").glob("*.json"))]
    assert sum(record["texts"] for record in records) == 2
    assert sum(record["empty"] for record in records) == 23
    assert [record["digest"] == "" for record in records].count(True) >= 6


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


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_claimed_shard_is_left_to_its_process(
    workers: int, model: Path, data: Path, tmp_path: Path
) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=3)
    with claim(tmp_path / "run/shards/.00001.lock") as held:
        assert held
        with pytest.raises(OutputError, match=r"shard 1 in .* is being computed by another"):
            job.run(shard=1)
        job.run(workers=workers)
        assert job.unfinished() == [1]
    job.run()
    assert job.unfinished() == []
    assert not list((tmp_path / "run").rglob(".*"))


def test_one_process_at_a_time_has_a_claim(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with claim(tmp_path / "lock", wait=True):
            order.append("second")

    with claim(tmp_path / "lock") as first, claim(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert not (tmp_path / "lock").exists()


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


def test_the_weights_are_hashed_by_one_process(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.models import _fingerprint as known

    hashed: list[object] = []
    hash_weights = known.hash_weights
    monkeypatch.setattr(known, "hash_weights", lambda m: hashed.append(m) or hash_weights(m))
    copy = shutil.copytree(model, tmp_path / "model")
    for shard in range(3):
        hw.corpus(copy, data, out=tmp_path / "run", shards=3).run(shard=shard)
    assert len(hashed) == 1
    (copy / "model.safetensors").touch()  # another file, with the same weights
    job = hw.corpus(copy, data, out=tmp_path / "other", shards=1)
    job.run()
    assert len(hashed) == 2


def test_a_job_sees_another_model_behind_the_same_name(
    model: Path, data: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    hw.corpus(copy, data, out=tmp_path / "run", shards=2).run(shard=0)
    write_model(copy, heads=2)
    job = hw.corpus(copy, data, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"run was computed with the model [0-9a-f]{16}, not"):
        job.run(shard=1)
    assert isinstance(job, CorpusJob)
    assert job.unfinished() == [1]
