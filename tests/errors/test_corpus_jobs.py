"""What a corpus job refuses, and that its folder stays as it was."""

import builtins
import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.corpora import streams
from headwise.corpora.streams import open_source
from headwise.errors import (
    ArgumentError,
    InputError,
    MissingPackageError,
    OutputError,
)
from headwise.jobs import CorpusJob, ImportanceRequest, merge_corpus

TEXTS = random_texts(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "data.parquet", TEXTS)


@pytest.fixture
def done(model: Path, data: Path, tmp_path: Path) -> CorpusJob:
    """A job of three shards, all finished."""
    job = hw.corpus(model, data, out=tmp_path / "run", shards=3)
    job.run()
    return job


def read(data: object, column: str = "text") -> list[str]:
    return list(open_source(data, column).texts(0, 1))


@pytest.mark.parametrize("data", [[], 3.5, ["a.txt", 4]])
def test_data_that_is_no_glob(data: Any) -> None:
    with pytest.raises((ArgumentError, TypeError)):
        open_source(data)


def test_a_file_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text")
    with pytest.raises(InputError, match=r"a\.csv ends in '\.csv'"):
        open_source(tmp_path / "*")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", r"line 3: not JSON \(Expecting .*\)\. Give one"),
        ("[1]", r"line 3: '\[1\]' is not an object with the key 'text'"),
        ('{"text": 5}', "line 3: 'text' is '5'"),
        ('{"text": "\\ud800"}', "line 3: 'text' holds a lone surrogate"),
        ("[" * 9999, "line 3: not JSON"),
    ],
)
def test_lines_that_hold_no_text(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "w1"}}\n\n{line}\n{{"text": "w1"}}\n')
    with pytest.raises(InputError, match=reason):
        read(path)


def test_a_text_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"w1\nw2 \xff\n")
    with pytest.raises(InputError, match=r"a\.txt, line 2: not UTF-8 \(byte 3 is 0xff\)"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.conllu"])
def test_a_compressed_file_with_the_name_of_a_plain_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "w1"}\n' * 99))
    with pytest.raises(InputError, match=rf"{name} is compressed by gzip, not UTF-8 text"):
        read(tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 there")
def test_a_file_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff.txt")
    path.write_text("w1")
    with pytest.raises(InputError, match=r"the name of '.*a\\udcff\.txt' is not UTF-8"):
        open_source(tmp_path / "*.txt")


def test_a_folder_in_place_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file matches .* It is a folder: name its files"):
        open_source(tmp_path)


def test_a_huge_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LONGEST_LINE", 50)
    path = write_texts(tmp_path / "a.txt", ["w1", "w2 " * 20, "w3"])
    with pytest.raises(InputError, match=r"a\.txt, line 2: more than 50 bytes"):
        read(path)


def test_parquet_that_is_none_or_has_no_texts(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no column 'body', only id, text"):
        read(data, "body")
    with pytest.raises(InputError, match=r"'id' is '0'\. Name the column"):
        read(data, "id")
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"data\.parquet cannot be read as Parquet"):
        read(data)
    data.write_bytes(b"")
    with pytest.raises(InputError, match=r"data\.parquet cannot be read as Parquet"):
        read(data)


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("w")])
def test_a_file_that_changes_after_the_job_began(
    change: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = write_texts(tmp_path / "a.txt", TEXTS)
    source = open_source(path)
    change(path)
    with pytest.raises(InputError, match=r"a\.txt (cannot be read|has 1 bytes, not \d+ as when)"):
        list(source.texts(0, 1))


def test_a_dataset_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train-0.parquet", TEXTS)
    name = f"datasets:{folder}"
    with pytest.raises(InputError, match=r"has no column 'body', only id, text"):
        read(name, "body")
    with pytest.raises(InputError, match=r"example 0 of shard 0 of .*: 'id' is '0'"):
        read(name, "id")
    with pytest.raises(InputError, match="split 'dev', cannot be opened"):
        read(f"{name}:dev")
    with pytest.raises(ArgumentError, match=r"and 1 more"):
        open_source([name, "a.txt"])
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("absent", name="datasets")
        return original(name, *rest)

    monkeypatch.setattr("headwise._packages.import_module", refuse)
    with pytest.raises(
        MissingPackageError, match=r"datasets is not installed.*headwise\[datasets\]"
    ):
        read(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shards", value) for value in (0, -1, 1.5, True, "3", 2**20 + 1)),
        *(("max_tokens", value) for value in (1, 0, -3, 2.5, "9")),
        ("request", "entropy"),
    ],
)
def test_a_number_or_request_that_is_none(
    name: str, value: Any, data: Path, tmp_path: Path
) -> None:
    with pytest.raises((ArgumentError, TypeError), match=f"{value}"):
        hw.corpus("model", data, out=tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "request_", [hw.Request(maps=True), hw.Request(spans=("doc",)), hw.Request(pairs=("arcs",))]
)
def test_requests_that_no_shard_can_answer(
    request_: hw.Request, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"the request has (maps|spans|pairs)="):
        hw.corpus("model", data, request_, out=tmp_path / "run")


@pytest.mark.parametrize("method", ["ablation", "gates", "none"])
def test_methods_that_need_all_texts(method: str) -> None:
    with pytest.raises(ArgumentError, match=f"method='{method}' needs all texts"):
        ImportanceRequest(method)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request", hw.Request(("entropy",))),
        ("request", hw.Request(queries="all")),
        ("request", hw.Request(relations={"mine": lambda ids: [(i, 0) for i in ids]})),
        ("request", ImportanceRequest()),
        ("shards", 4),
        ("max_tokens", 9),
        ("column", "id"),
    ],
)
def test_the_folder_of_another_job(
    name: str, value: Any, model: Path, data: Path, done: CorpusJob, tmp_path: Path
) -> None:
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=r"run is the folder of another job: its \w+ is .*, not"):
        hw.corpus(model, data, **{"out": tmp_path / "run", name: value})
    write_parquet(tmp_path / "data2.parquet", TEXTS)
    with pytest.raises(InputError, match=r"another job: its data is of files \[.*, not \["):
        hw.corpus(model, tmp_path / "data*.parquet", out=tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_relations_of_one_name_and_other_code_are_another_job(
    model: Path, data: Path, tmp_path: Path
) -> None:
    def job(relation: Any) -> CorpusJob:
        request = hw.Request(("entropy",), relations={"mine": relation})
        return hw.corpus(model, data, request, out=tmp_path / "run")

    job(lambda ids: [(i, 0) for i in range(len(ids))])
    with pytest.raises(InputError, match="its measured is of relations of mine"):
        job(lambda ids: [(i, 1) for i in range(len(ids))])


def test_a_folder_in_use_for_something_else(model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"run holds thesis\.txt, and no job"):
        hw.corpus(model, data, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"run is not the folder .* no job\.json"):
        merge_corpus(tmp_path / "run")
    with pytest.raises(OutputError, match=r"thesis\.txt/shards cannot be written \(Not a dir"):
        hw.corpus(model, data, out=tmp_path / "run" / "thesis.txt")
    with pytest.raises(OutputError, match=r"thesis\.txt/run/shards cannot be written"):
        hw.corpus(model, data, out=tmp_path / "run" / "thesis.txt" / "run")


def test_missing_shards_are_named(done: CorpusJob, tmp_path: Path) -> None:
    (tmp_path / "run/shards/00001.json").unlink()
    with pytest.raises(
        InputError, match=r"run lacks 1 of 3 shards, with the numbers 1\. Run the job"
    ):
        merge_corpus(tmp_path / "run")
    done.run()
    done.merge()


def overwrite(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: (run / "shards/00001.parquet").unlink(), r"00001\.parquet"),
        (lambda run: (run / "shards/00001.parquet").write_bytes(b"half"), r"00001\.parquet"),
        (lambda run: (run / "shards/00001.json").write_text("{"), r"00001\.json is not JSON"),
        (overwrite("shards/00001.json", shard=2), "shard 1 in .* is of shard 2, not 1"),
        (overwrite("shards/00001.json", job="other"), "shard 1 in .* is of job 'other'"),
        (overwrite("shards/00001.json", model="other"), "shard 1 in .* is of model 'other'"),
        (overwrite("shards/00001.json", tokenizer="x"), "shard 1 in .* is of tokenizer 'x'"),
        (overwrite("job.json", measured=5), r"job\.json is damaged"),
        (overwrite("job.json", headwise_job=7), "has schema 7 and 3 shards, not 2"),
        (overwrite("job.json", shards="many"), "has schema 2 and many shards"),
    ],
)
def test_damaged_shards_are_refused(
    damage: Callable[[Path], Any], reason: str, done: CorpusJob, tmp_path: Path
) -> None:
    damage(tmp_path / "run")
    with pytest.raises(InputError, match=reason):
        merge_corpus(tmp_path / "run")


@pytest.mark.parametrize(
    ("other", "reason"), [("model", "model"), ("request", "job"), ("version", "job")]
)
def test_merge_refuses_a_shard_of_another(
    other: str,
    reason: str,
    model: Path,
    data: Path,
    done: CorpusJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it had been copied from the folder of a similar job."""
    request = hw.Request(("entropy",)) if other == "request" else None
    name = write_model(tmp_path / "model", heads=2) if other == "model" else model
    with monkeypatch.context() as patch:
        if other == "version":
            patch.setattr("headwise.jobs._corpus.version", lambda package: "0.0.1")
        job = hw.corpus(name, data, request, out=tmp_path / "similar", shards=3)
        job.run(shard=1)
    for path in (tmp_path / "similar/shards").glob("00001.*"):
        shutil.copy(path, tmp_path / "run/shards")
    for merge in (done.merge, lambda: merge_corpus(tmp_path / "run")):
        with pytest.raises(InputError, match=rf"shard 1 in .*run is of {reason} '\w+', not '\w+'"):
            merge()


def test_shards_of_another_tokenizer_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    tokenizer = hw.load_tokenizer(model)
    hw.corpus(model, data, out=tmp_path / "run", shards=2, tokenizer=tokenizer).run(shard=0)
    tokenizer.add_tokens("w9 w9")
    job = hw.corpus(model, data, out=tmp_path / "run", tokenizer=tokenizer)
    job.run()
    with pytest.raises(InputError, match=r"shard 1 in .*run is of tokenizer '\w+', not '\w+'"):
        job.merge()


def test_texts_without_a_token(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", " ", None])
    job = hw.corpus(model, path, out=tmp_path / "run", shards=2)
    job.run()
    with pytest.raises(InputError, match=r"shards has 2 shards, and no text with a token"):
        job.merge()


@pytest.mark.parametrize("shard", [3, -1, True])
def test_shards_that_do_not_exist(shard: int, done: CorpusJob) -> None:
    with pytest.raises(
        ArgumentError, match=rf"shard={shard} of 3 shards\. Give a shard from 0 to 2"
    ):
        done.run(shard=shard)


def test_a_model_in_memory_without_a_tokenizer(model: Path, data: Path, tmp_path: Path) -> None:
    job = hw.corpus(hw.load(model), data, out=tmp_path / "run")
    with pytest.raises(ArgumentError, match="LlamaForCausalLM without a tokenizer"):
        job.run()


def test_a_full_disk_leaves_the_shard_unfinished(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=3)
    job.run(shard=0)
    kept = (tmp_path / "run/shards/00000.parquet").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pandas.DataFrame.to_parquet", full)
        with pytest.raises(OutputError, match=r"00001\.parquet cannot be written \(No space left"):
            job.run()
    assert job.unfinished() == [1, 2]
    assert (tmp_path / "run/shards/00000.parquet").read_bytes() == kept
    names = sorted(path.name for path in (tmp_path / "run/shards").iterdir())
    assert names == ["00000.json", "00000.parquet"]


def test_a_folder_that_may_not_be_written(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hw.corpus(model, data, out=tmp_path / "run", shards=2)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may write anywhere
    with pytest.raises(OutputError, match=r"cannot be written \(Permission denied\)"):
        job.run(shard=0)
