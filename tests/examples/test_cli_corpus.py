"""`headwise corpus` and `headwise merge`."""

import json
from pathlib import Path

import pytest

import headwise as hw
from command import headwise
from corpus_files import random_texts, write_model, write_texts
from headwise.jobs import ImportanceRequest
from headwise.tables import HeadTable, Scores


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_model(folder / "model")
    write_texts(folder / "a.txt", random_texts(9))
    return folder


def test_shards_are_computed_one_by_one_and_merged(place: Path) -> None:
    run, data = place / "run", ("--data", place / "*.txt")
    done = headwise("corpus", place / "model", *data, "--out", run, "--shards", 3, "--shard", 1)
    assert (done.code, "1 of 3 shards finished" in done.err) == (0, True)
    early = headwise("merge", run)
    assert (early.code, early.out) == (2, "")
    assert "lacks 2 of 3 shards, with the numbers 0, 2. Run the job again." in early.err
    done = headwise("corpus", place / "model", *data, "-o", run)
    assert "3 of 3 shards finished" in done.err
    merged = headwise("merge", run, "-o", place / "table.parquet", "--json")
    assert merged.code == 0
    table = HeadTable.load(place / "table.parquet")
    assert [row["name"] for row in json.loads(merged.out)] == [str(head) for head in table.heads]
    job = hw.corpus(place / "model", str(place / "*.txt"), out=place / "plain", shards=3)
    job.run()
    assert (job.merge().mean("entropy") == table.mean("entropy")).all()
    assert "entropy" in headwise("merge", run).out


def test_the_importance_of_a_corpus_is_merged(place: Path) -> None:
    run = place / "scores"
    job = hw.corpus(place / "model", str(place / "a.txt"), ImportanceRequest("gradient"), out=run)
    job.run()
    assert headwise("merge", run, "-o", place / "scores.csv").code == 0
    assert Scores.load(place / "scores.csv").method == "gradient"


def test_an_interrupt_says_how_to_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.jobs.CorpusJob.run", interrupt)
    run = place / "interrupted"
    done = headwise("corpus", place / "model", "--data", place / "a.txt", "-o", run)
    assert done.code == 130
    assert f"Run the same command again: it skips the finished shards in {run}." in done.err
