"""Batches of texts become rows of bytes, which add up in any order, by any engine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import headwise as hw
from command import headwise
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.batches import BatchImportance, observe_files, read_rows
from headwise.errors import ArgumentError, InputError, UnsupportedError

TEXTS = random_texts(53)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def observer(folder: Path) -> hw.BatchObserver:
    return _observer(folder)


def _observer(folder: Path, **options: Any) -> hw.BatchObserver:
    """In float64, so that it matters little which texts share a batch."""
    return hw.BatchObserver(folder, dtype=torch.float64, **options)


def _shuffled(texts: Sequence[str], parts: int, seed: int) -> list[dict[str, Any]]:
    order = np.random.default_rng(seed).permutation(len(texts))
    return [{"text": [texts[i] for i in part]} for part in np.array_split(order, parts)]


def _assert_equal(table: hw.HeadTable, known: hw.HeadTable) -> None:
    assert (table.heads, table.model) == (known.heads, known.model)
    for name in known.statistics:
        np.testing.assert_array_equal(table.count(name), known.count(name))
        for part in ("mean", "standard_error", "maximum", "uniform"):
            values, expected = getattr(table, part)(name), getattr(known, part)(name)
            np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)


def test_tables_of_any_partition_in_any_order_are_that_of_one_watch(
    folder: Path, observer: hw.BatchObserver
) -> None:
    model, tokenizer = hw.load(folder, dtype=torch.float64), hw.load_tokenizer(folder)
    with hw.observe(model) as watch, torch.no_grad():
        for text in TEXTS:
            model(**tokenizer(text, return_tensors="pt"))
    texts = []
    for seed, parts in enumerate((1, 4, 13)):
        rows = [observer(batch) for batch in _shuffled(TEXTS, parts, seed)]
        table = hw.HeadTable.sum(rows)
        _assert_equal(table, watch.table())
        texts.append(table.texts)
    # What was read is known by the tokens of all texts, in any order.
    assert texts[0] == texts[1] == texts[2]
    assert texts[0]["texts"] == len(TEXTS)
    assert (table + watch.table()).texts == watch.table().texts == {}
    fewer = hw.HeadTable.sum([observer({"text": TEXTS[1:]})])
    assert (fewer + hw.HeadTable.sum([observer({"text": TEXTS[:1]})])).texts == texts[0]
    assert fewer.texts["sha256"] != texts[0]["sha256"]


@pytest.mark.full
def test_rows_of_every_engine_add_up(observer: hw.BatchObserver) -> None:
    known = hw.HeadTable.sum([observer({"text": TEXTS})])
    batches = _shuffled(TEXTS, 4, 0)
    frames = [pd.DataFrame(observer(pd.DataFrame(batch))) for batch in batches]
    mapped = datasets.Dataset.from_dict({"text": TEXTS}).map(
        observer, batched=True, batch_size=20, remove_columns=["text"]
    )
    arrow = pa.concat_tables(pa.table(observer(batch)) for batch in batches)
    tables = [hw.HeadTable.from_bytes(observer(batch)["table"][0]) for batch in batches]
    for rows in (pd.concat(frames), mapped, arrow, arrow.to_pylist(), tables):
        _assert_equal(hw.HeadTable.sum(rows), known)


def test_scores_of_batches_are_those_of_all_texts(folder: Path) -> None:
    scorer = BatchImportance(folder, "gradient", dtype=torch.float64)
    rows = [scorer({"text": part}) for part in (TEXTS[:30], [" "], TEXTS[30:])]
    assert rows[1] == {"table": [b""], "skipped": [0]}
    scores = hw.Scores.sum(rows)
    model, tokenizer = hw.load(folder, dtype=torch.float64), hw.load_tokenizer(folder)
    known = hw.importance(model, TEXTS, "gradient", tokenizer=tokenizer)
    np.testing.assert_allclose(scores.importance, known.importance, rtol=1e-9)
    assert (scores.heads, scores.method, scores.loss) == (known.heads, known.method, known.loss)
    assert len(scores.per_text) == len(known.per_text)


def test_a_table_survives_its_bytes(observer: hw.BatchObserver, folder: Path) -> None:
    keeping = _observer(folder, request=hw.Request(("entropy", "previous"), per_text=True))
    table = replace(hw.HeadTable.sum([keeping({"text": TEXTS[:5]})]), skipped=3)
    again = hw.HeadTable.from_bytes(table.to_bytes())
    pd.testing.assert_frame_equal(again.frame(detail=True), table.frame(detail=True))
    texts = again.per_text("entropy").total, table.per_text("entropy").total
    np.testing.assert_array_equal(*texts)
    assert again.skipped == 3
    assert (again + again).skipped == 6


class Picky(nn.Module):
    """Refuses a token; alone or among others."""

    def __init__(self, model: nn.Module, token: int) -> None:
        super().__init__()
        self.model, self.token = model, token

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        if (input_ids == self.token).any():
            raise RuntimeError(f"no token {self.token}, please")
        return self.model(input_ids=input_ids, attention_mask=attention_mask)


def test_a_refused_text_is_named_with_its_file_and_row_or_counted(folder: Path) -> None:
    tokenizer, model = hw.load_tokenizer(folder), hw.load(folder)
    picky = Picky(model, tokenizer.convert_tokens_to_ids("w7")).eval()
    texts = ["w1 w2 w3", None, "w7 w7", "w4 w5", float("nan"), 5]
    batch = {"text": texts, "path": ["a.txt"] * 6, "row": range(11, 17)}
    named = r"row 13 of a.txt, 'w7 w7', cannot be measured \(no token \d+, please\). Correct it"
    with pytest.raises(InputError, match=named):
        hw.BatchObserver(picky, tokenizer=tokenizer)(batch)
    row = hw.BatchObserver(picky, tokenizer=tokenizer, on_error="skip")(batch)
    assert row["skipped"] == [2]
    table = hw.HeadTable.sum([row])
    assert table.skipped == 2
    assert table.count("entropy").tolist() == [5 - 2] * len(table.heads)  # of 3 and 2 tokens
    with pytest.raises(ArgumentError, match=r"no row holds a table \(1 texts were skipped\)"):
        hw.HeadTable.sum([{"table": b"", "skipped": 1}])


def test_texts_that_fail_only_together_are_measured_alone(
    folder: Path, observer: hw.BatchObserver
) -> None:
    class Small(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            if len(input_ids) > 3:
                raise RuntimeError("out of memory")
            return self.model(input_ids=input_ids, attention_mask=attention_mask)

    small = Small(hw.load(folder, dtype=torch.float64)).eval()
    frame = pd.DataFrame({"text": TEXTS})[20:30]  # whose rows are not numbered from 0
    row = hw.BatchObserver(small, tokenizer=hw.load_tokenizer(folder))(frame)
    known = observer({"text": TEXTS[20:30]})
    counts = [hw.HeadTable.sum([each]).count("entropy") for each in (row, known)]
    np.testing.assert_array_equal(*counts)
    assert row["skipped"] == [0]


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda f: hw.BatchObserver(hw.load(f), dtype=None), ArgumentError, "dtype for a model in m"),
    (lambda f: hw.BatchObserver(hw.load(f)), ArgumentError, "tokenizer=None, and LlamaForC"),
    (lambda f: hw.BatchObserver(nn.Linear(2, 3), tokenizer=1), UnsupportedError, "Linear read"),
    (lambda f: hw.BatchObserver(f, hw.Request(pairs=("x",))), ArgumentError,
     r"the request has pairs or spans \(x\), which are given pass by pass"),
    (lambda f: BatchImportance(f, "ablation"), ArgumentError, "'ablation' needs all texts"),
    (lambda f: hw.BatchObserver(f)({"words": ["a"]}), ArgumentError, "'text', only words"),
    (lambda f: hw.HeadTable.sum([{"table": b"x"}]), ArgumentError, r"a row is \"\{'table'"),
    (lambda f: hw.HeadTable.sum([3]), ArgumentError, "a row is '3'"),
    (lambda f: hw.HeadTable.from_bytes(b"PAR1"), InputError, "the content of 4 bytes is no t"),
])  # fmt: skip
def test_wrong_use_is_refused(folder: Path, call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(folder)


@pytest.mark.parametrize("change", [{"method": "x"}, {"rounds": np.zeros(6, np.int64)}])
def test_scores_that_do_not_belong_together_are_refused(folder: Path, change: Any) -> None:
    scores = hw.Scores.sum([BatchImportance(folder)({"text": TEXTS[:4]})])
    with pytest.raises(ArgumentError, match=r"'x' differ|of several rounds"):
        scores + replace(scores, **change)


def test_files_of_every_kind_give_their_rows(tmp_path: Path) -> None:
    texts = [*TEXTS[:9], "w1", '5 "w2"', "w1 " * 2**19, "w2"]  # one of more than a MiB
    pd.DataFrame({"text": texts}).to_csv(tmp_path / "a.csv")
    paths = [
        write_parquet(tmp_path / "a.parquet", texts),
        write_jsonl(tmp_path / "a.jsonl", texts),
        write_texts(tmp_path / "a.txt", texts),
        tmp_path / "a.csv",
    ]
    for path in map(str, paths):
        rows = [*read_rows(path, "text")]
        assert [row["text"] for row in rows] == texts
        assert rows[3] == {"text": texts[3], "path": path, "row": 4}
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n\n{"text": "w2"}\n', "utf-8-sig")
    rows = [*read_rows(str(tmp_path / "a.jsonl"), "text")]
    assert [(row["text"], row["row"]) for row in rows] == [("w1", 1), ("", 2), ("w2", 3)]
    write_texts(tmp_path / "b.txt", ["w1"])
    assert [row["path"] for row in read_rows(str(tmp_path / "b.txt"), "path")] == ["w1"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "b.jsonl").write_text('["w1"]')
    (tmp_path / "c.jsonl").write_text('{"words": "w1"}\n{"words":')
    write_jsonl(tmp_path / "a.jsonl", ["w1"])
    write_parquet(tmp_path / "b.parquet", ["w1"])
    write_texts(tmp_path / "a.csv", ["text", "w1"])
    for name, reason in [
        ("a.parquet", "Could not read schema"),
        ("a.txt", "utf-8"),
        ("b.jsonl", "list indices"),
        ("a.jsonl", "'words'"),
        ("b.parquet", "words"),
        ("a.csv", "'words'"),
    ]:
        with pytest.raises(InputError, match=rf"{name} cannot be read \(.*{reason}.*\). Give"):
            [*read_rows(str(tmp_path / name), "words")]
    with pytest.raises(InputError, match=r"c.jsonl cannot be read after row 1 \("):
        [*read_rows(str(tmp_path / "c.jsonl"), "words")]
    (tmp_path / "a.bin").touch()
    for pattern in ("*.zip", "a.bin"):
        with pytest.raises(InputError, match=rf"{re.escape(pattern)} is no file of texts. Name"):
            observe_files([str(tmp_path / pattern)], model="x")


def test_without_ray_the_command_reads_the_files_in_its_own_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "a.txt", TEXTS[:30])
    write_parquet(tmp_path / "b.parquet", TEXTS[30:])
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("headwise.batches.find_spec", lambda name: None)
    data = ("--data", str(tmp_path / "*.*"))
    done = headwise("observe", folder, *data, "--dtype", "float64", "-o", tmp_path / "t.parquet")
    assert done.code == 0, done.err
    for options, message in [
        ((*data, "--text", tmp_path / "a.txt"), "--text is not for --data"),
        ((), "Give --text FILE, or --data GLOB"),
    ]:
        assert message in headwise("observe", folder, *options).err
    known = hw.HeadTable.sum([_observer(folder)({"text": TEXTS})])
    _assert_equal(hw.HeadTable.load(tmp_path / "t.parquet"), known)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "w1"}\n{"text": "w1 \\ud800"}\n')
    assert f"row 2 of {bad}, 'w1 " in headwise("observe", folder, "--data", bad).err


class Engine:
    """What the command asks of Ray, done in this process."""

    def __init__(self, **resources: float) -> None:
        self.resources, self.asked = resources, {}

    def as_modules(self) -> dict[str, Any]:
        data = SimpleNamespace(from_items=self.from_items, ActorPoolStrategy=dict)
        exceptions = SimpleNamespace(RayError=RuntimeError)
        ray = SimpleNamespace(init=self.init, cluster_resources=lambda: self.resources)
        ray.data, ray.exceptions = data, exceptions
        return {"ray": ray, "ray.data": data}

    def init(self, address: str, **_: Any) -> None:
        self.asked["address"] = address

    def from_items(self, items: list[Any]) -> "Engine":
        self.items = items
        return self

    def flat_map(self, function: Any, num_cpus: float) -> "Engine":
        self.items = [each for item in self.items for each in function(item)]
        return self

    def repartition(self, target_num_rows_per_block: int) -> "Engine":
        return self

    def map_batches(self, kind: Any, fn_constructor_kwargs: Any, **asked: Any) -> Any:
        self.asked |= asked | fn_constructor_kwargs
        yield kind(**fn_constructor_kwargs | {"device": "cpu"})(pd.DataFrame(self.items))


@pytest.mark.parametrize(("resources", "options", "asked"), [
    ({"CPU": 1.0}, {}, (1, 0, 0)),  # a whole CPU is for what reads
    ({"CPU": 2.0}, {}, (2, 0.25, 0)),
    ({"CPU": 2.0}, {"workers": 4}, (4, 0.12, 0)),
    ({"CPU": 16.0}, {"workers": 2, "address": "head:6379"}, (2, 0.5, 0)),
    ({"CPU": 16.0, "GPU": 4.0}, {}, (16, 0.47, 0)),
    ({"CPU": 16.0, "GPU": 4.0}, {"device": "cuda"}, (4, 0.5, 1)),
    ({"CPU": 16.0, "GPU": 4.0}, {"device": torch.device("cuda"), "workers": 3}, (3, 0.5, 1)),
    ({"CPU": 2.0}, {"device": "cuda:0"}, None),
])  # fmt: skip
def test_workers_of_ray_get_a_share_of_the_cpus_and_a_gpu_each(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, float],
    options: dict[str, Any],
    asked: tuple[int, float, int] | None,
) -> None:
    engine = Engine(**resources)
    for name, module in engine.as_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("headwise.batches.find_spec", lambda name: name)
    # Processes of a cluster work in another folder.
    monkeypatch.chdir(write_texts(tmp_path / "a.txt", TEXTS[:5]).parent)
    if asked is None:
        with pytest.raises(UnsupportedError, match=r"device 'cuda:0', and Ray knows of no GPU\."):
            observe_files(["*.txt"], model="hub/name", **options)
        return
    table = observe_files(["*.txt"], model=os.path.relpath(folder), **options)
    assert table.count("entropy").all()
    given = engine.asked["compute"]["size"], engine.asked["num_cpus"], engine.asked["num_gpus"]
    assert given == asked
    assert engine.asked["address"] == options.get("address", "local")
    assert (engine.items[0]["path"], engine.asked["model"]) == (
        str(tmp_path / "a.txt"),
        str(folder),
    )


# Ray and Spark, which take long to start.

SHARE = 0.5  # of a CPU: what reads and shuffles texts runs beside the models


def _dying() -> type:
    """Local, so that a worker, which knows no tests, gets its code by value."""

    class Dying(hw.BatchObserver):
        """Kills its own process at its second batch, once."""

        def __init__(self, *args: Any, marker: str, **options: Any) -> None:
            super().__init__(*args, **options)
            self.marker, self.calls = Path(marker), 0

        def __call__(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls > 1 and not self.marker.exists():
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    return Dying


@pytest.fixture(scope="module")
def ray() -> Any:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # of Ray's own
def test_ray_gives_the_same_table_also_if_a_worker_is_killed(
    ray: Any, folder: Path, observer: hw.BatchObserver, tmp_path: Path
) -> None:
    known = hw.HeadTable.sum([observer({"text": TEXTS})])
    texts = ray.data.from_items([{"text": text} for text in TEXTS]).random_shuffle(seed=0)
    options = {"model": str(folder), "dtype": torch.float64}
    marker = tmp_path / "killed"
    tables = texts.repartition(4).map_batches(
        _dying(),
        fn_constructor_kwargs=options | {"marker": str(marker)},
        batch_size=13,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=SHARE,
    )
    # What a driver had written before it died adds up later.
    tables.write_parquet(str(tmp_path / "tables"))
    assert marker.exists()
    for rows in (
        ray.data.read_parquet(str(tmp_path / "tables")),
        pd.read_parquet(tmp_path / "tables"),
    ):
        _assert_equal(hw.HeadTable.sum(rows), known)
    scores = texts.map_batches(
        BatchImportance,
        fn_constructor_kwargs=options,
        batch_size=20,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=SHARE,
    )
    assert len(hw.Scores.sum(scores).per_text) == len(TEXTS)
    write_texts(tmp_path / "a.txt", TEXTS)
    files = observe_files([str(tmp_path / "a.txt")], **options)
    _assert_equal(files, known)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "w1"}\n{"text": "w1 \\ud800"}\n')
    with pytest.raises(InputError, match=rf"^BatchObserver: row 2 of {bad}, 'w1 .*half of a sur"):
        observe_files([str(bad)], workers=1, **options)


SPARK = """
import sys
import pandas as pd
import torch
from pyspark.sql import SparkSession
import headwise as hw

folder = sys.argv[1]

def measure(frames):
    observer = hw.BatchObserver(folder, dtype=torch.float64)
    for frame in frames:
        yield pd.DataFrame(observer(frame))

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
texts = spark.read.text(sys.argv[2]).withColumnRenamed("value", "text").repartition(2)
tables = texts.mapInPandas(measure, "table binary, skipped long")
hw.HeadTable.sum(tables.collect()).save(sys.argv[3])
"""


@pytest.mark.full
def test_spark_gives_the_same_table(
    folder: Path, observer: hw.BatchObserver, tmp_path: Path
) -> None:
    data, out = write_texts(tmp_path / "a.txt", TEXTS), tmp_path / "t.parquet"
    command = [sys.executable, "-c", SPARK, folder, data, out]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    _assert_equal(hw.HeadTable.load(out), hw.HeadTable.sum([observer({"text": TEXTS})]))
