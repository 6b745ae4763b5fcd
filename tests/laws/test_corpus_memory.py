"""Memory of reading a corpus does not grow with its size; of watching a text, with its length."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

import headwise as hw
from corpus_files import random_texts, write_jsonl, write_model, write_parquet, write_texts
from headwise.corpora.streams import open_source

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


def growth_of_job(place: Path) -> tuple[int, int]:
    """By how much a job grows after its third shard of 12: objects of Python, and the process.

    Objects are counted, so that neither load nor what the allocator keeps matters; the process has
    tensors too. Garbage is collected first, because a job does so after some seconds only.
    """
    path = write_jsonl(place / "a.jsonl", random_texts(300) * 12)
    job = hw.corpus(write_model(place / "model"), path, out=place / "run", shards=12)
    objects: list[int] = []
    resident: list[int] = []

    def sample(*_: int) -> None:
        gc.collect()
        objects.append(tracemalloc.get_traced_memory()[0])
        resident.append(psutil.Process().memory_info().rss)

    tracemalloc.start()
    try:
        job.run(on_progress=sample)
        job.merge()
    finally:
        tracemalloc.stop()
    assert len(objects) == 12
    return max(objects[2:]) - objects[2], max(resident[2:]) - resident[2]


@pytest.mark.full
def test_a_job_over_a_large_file_has_flat_memory(tmp_path: Path) -> None:
    objects, resident = growth_of_job(tmp_path)
    assert objects < 2**18
    assert resident < 2**23


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
