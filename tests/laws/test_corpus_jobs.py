"""A corpus job gives the same bytes however its shards are computed, and those of a plain watch."""

import ctypes
import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datatrove.executor import LocalPipelineExecutor
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.corpora import read_conllu
from headwise.corpora.streams import open_source
from headwise.jobs import ImportanceRequest, merge_corpus
from headwise.tables import COLUMNS, HeadTable
from small_files import TREE

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


# However a corpus is cut, its shards hold every text once, in order.


SHARDS = st.integers(1, 12)
# White space of all kinds, characters of one to four bytes, and marks of other formats.
CHARACTERS = st.sampled_from('ab \t\x0c\x85\u2028\u00a0\ufeffé日𝄞#\\"')
LINES = st.lists(st.text(CHARACTERS, max_size=9), max_size=12)
BREAKS = st.sampled_from(["\n", "\r\n"])


def all_texts(data: object, shards: int) -> list[str]:
    """The texts of all shards of one file, in the order of the file."""
    source = open_source(data)
    dealt = [list(source.texts(i, shards)) for i in range(shards)]
    return [dealt[n % shards][n // shards] for n in range(sum(map(len, dealt)))]


@given(lines=LINES, newline=BREAKS, shards=SHARDS, end=st.booleans())
def test_shards_of_a_text_file_are_its_texts(
    lines: list[str], newline: str, shards: int, end: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_text(newline.join(lines) + newline * end, "utf-8", newline="")
    expected = path.read_bytes().decode("utf-8-sig").split("\n")
    expected = [line.rstrip() for line in expected]
    assert [t for t in all_texts(path, shards) if t] == [line for line in expected if line]


@given(texts=st.lists(st.text(max_size=20) | st.none(), max_size=20), shards=SHARDS, rows=SHARDS)
def test_shards_of_parquet_and_json_are_their_texts(
    texts: list[str | None], shards: int, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [t if t is None else t.encode("utf-8", "ignore").decode() for t in texts]
    expected = [text or "" for text in texts]
    assert all_texts(write_parquet(folder / "a.parquet", texts, rows), shards) == expected
    assert all_texts(write_jsonl(folder / "a.jsonl", texts), shards) == expected


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 50])
def test_shards_of_conllu_are_its_sentences(shards: int, tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(f"# a comment alone\n\n{TREE}{TREE.replace('go', 'sing')}\n\n{TREE}", "utf-8")
    sentences = [text for text in all_texts(path, shards) if text]
    assert sentences == [sentence.text for sentence in read_conllu(path)]
    assert sentences[1] == "don't sing"


def test_other_keys_of_json_lines_may_hold_anything(tmp_path: Path) -> None:
    """Identifiers of 19 digits, broken emoji and repeated keys are common in corpora."""
    others = ["1234567890123456789", "9" * 5000, r'"\ud83d"', "NaN", "1e999", "{}", '"", "id": 2']
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": {other}, "text": "w1 w2"}}\n' for other in others))
    assert all_texts(path, 3) == ["w1 w2"] * len(others)


@pytest.mark.parametrize("kind", ["null", "string_view", "large_string", "dictionary"])
def test_texts_of_parquet_have_any_type_of_texts(kind: str, tmp_path: Path) -> None:
    """Writers give a column without any text the type null."""
    texts = pa.array(["a", None, "b", "a", "é"], pa.string())
    if kind == "null":
        texts = column = pa.nulls(5)
    else:
        column = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert all_texts(tmp_path / "a.parquet", 2) == [text or "" for text in texts.to_pylist()]


@pytest.mark.parametrize("name", ["a [1].txt", "日 本.txt"])
def test_a_file_is_named_literally_before_it_is_a_glob(name: str, tmp_path: Path) -> None:
    for each in (name, "1.txt"):
        (tmp_path / each).write_text(each)
    assert all_texts(tmp_path / name, 1) == [name]


# Memory of reading a corpus does not grow with its size; of watching a text, with its length.


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.txt": write_texts,
    "a.parquet": lambda path, texts: write_parquet(path, texts, 500),
}


def peak(work: Callable[[], object]) -> int:
    """The most bytes that Python had allocated at once while this worked."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_all(path: Path, shards: int) -> int:
    source = open_source(path)
    return sum(1 for shard in range(shards) for _ in source.texts(shard, shards))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "a.jsonl" else pytest.mark.full) for name in WRITERS],
)
def test_reading_takes_the_memory_of_few_texts(name: str, tmp_path: Path) -> None:
    texts = random_texts(200) * 30  # half a megabyte
    path = WRITERS[name](tmp_path / name, texts)
    assert read_all(path, 3) == len(texts)
    assert peak(lambda: read_all(path, 3)) < 250_000 < path.stat().st_size or name == "a.parquet"


class Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc: what malloc has given out, beside its own bookkeeping."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> int:
    """The bytes of this process that are in use: of tensors, not of objects of Python.

    Pages are no measure: malloc keeps what was freed, more of it the more threads there were.
    """
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocated
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def growth_of_job(place: Path, leak: Callable[[], object] = lambda: None) -> tuple[int, int]:
    """By how much a job grows after its third shard of 12: objects of Python, and tensors.

    Garbage is collected first, because a job does so after some seconds only.
    """
    path = write_jsonl(place / "a.jsonl", random_texts(300) * 12)
    job = hw.corpus(write_model(place / "model"), path, out=place / "run", shards=12)
    objects: list[int] = []
    tensors: list[int] = []

    def sample(*_: int) -> None:
        leak()
        gc.collect()
        objects.append(tracemalloc.get_traced_memory()[0])
        tensors.append(allocated())

    tracemalloc.start()
    try:
        job.run(on_progress=sample)
        job.merge()
    finally:
        tracemalloc.stop()
    assert len(objects) == 12
    return max(objects[2:]) - objects[2], max(tensors[2:]) - tensors[2]


@pytest.mark.full
def test_a_job_over_a_large_file_has_flat_memory(tmp_path: Path) -> None:
    objects, tensors = growth_of_job(tmp_path)
    assert objects < 2**18
    assert tensors < 2**20


@pytest.mark.full
def test_a_job_that_kept_a_tensor_of_each_shard_would_be_noticed(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    _, tensors = growth_of_job(tmp_path, lambda: kept.append(torch.ones(2**16)))
    assert tensors > 2**20


def watched_peak(model: torch.nn.Module, tokens: int) -> int:
    """The bytes of tensors that are alive at the end of a pass, beyond those before it."""
    process = psutil.Process()
    before = process.memory_info().rss
    highest = before

    def note(*_: object) -> None:
        nonlocal highest
        highest = max(highest, process.memory_info().rss)

    with torch.no_grad(), hw.observe(model) as watch:
        hook = model.register_forward_hook(note)
        model(torch.randn(1, tokens, 16), causal=True)
        hook.remove()
    assert (watch.table().count("entropy") == tokens - 1).all()
    return highest - before


@pytest.mark.full
def test_memory_of_a_long_text_is_linear() -> None:
    """A map of 32k tokens would take 4 GiB for each head."""
    layer = hw.MultiHeadAttention(16, 4, rope=hw.RoPE(4)).eval()
    watched_peak(layer, 512)
    assert watched_peak(layer, 32768) < 2**28


@pytest.mark.full
def test_the_study_of_a_book(tmp_path: Path) -> None:
    """500 kB in one paragraph: split by the context, and its page written."""
    model_folder = write_model(tmp_path / "model")
    texts = [" ".join(random_texts(9000, longest=35))]
    assert len(texts[0]) > 500_000
    process = psutil.Process()
    before = process.memory_info().rss
    study = hw.study(hw.load(model_folder), hw.load_tokenizer(model_folder), texts)
    path = study.report(tmp_path / "book.html")
    assert study.text["texts"] == 1
    assert int(study.text["pieces of texts"]) > 3000
    assert process.memory_info().rss - before < 2**29
    assert path.stat().st_size < 5_000_000
