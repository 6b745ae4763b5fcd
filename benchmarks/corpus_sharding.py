"""What cutting a corpus into shards costs, and how much two workers gain.

    OMP_NUM_THREADS=1 python benchmarks/corpus_sharding.py --into benchmarks/results/corpus-jobs.md

Overhead: the time of a job of many shards, the model already open, to that of one shard of the same
texts, in paired rounds; what they take more, divided by their number, is what a shard costs besides
its texts. Workers: one and two processes on the same job, by the wall clock, after
they have opened the model: run it on a machine with two idle cores.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _corpus import write_corpus, write_model
from _report import cpu_name, insert, software, table
from _timing import Paired, interleaved

import headwise as hw
from headwise.jobs import CorpusJob


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=250_000)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = write_model(place / "model", width=256)
        data = write_corpus(place / "data.jsonl", options.bytes)
        rows = [
            *overhead_rows(model, data, place, options),
            *worker_rows(model, data, place, options),
        ]
    text = f"{software()}, {cpu_name()}, one thread a process.\n\n" + table(
        ("", "time", "ratio"), rows
    )
    print(text)
    if options.into:
        insert(text, options.into, "sharding")


def overhead_rows(
    model: Path, data: Path, place: Path, options: argparse.Namespace
) -> list[tuple[str, str, str]]:
    """The same texts in one shard and in many, with merging."""
    opened = hw.load(model), hw.load_tokenizer(model)

    def work(shards: int) -> None:
        run = place / f"shards{shards}"
        shutil.rmtree(run, ignore_errors=True)
        job = hw.corpus(opened[0], data, out=run, shards=shards, tokenizer=opened[1])
        job.run()
        job.merge()

    works = {"one": lambda: work(1), "many": lambda: work(options.shards)}
    times = interleaved(works, options.rounds, options.clock)
    more = times.difference("many", "one")
    cost = Paired(*(value / (options.shards - 1) for value in (more.median, more.low, more.high)))
    return [
        ("one shard", f"{times.median('one') / 1000:.2f} s", "1"),
        (
            f"{options.shards} shards, merged",
            f"{times.median('many') / 1000:.2f} s",
            str(times.ratio("many", "one")),
        ),
        ("a shard more", f"{cost.median:.0f} ms [{cost.low:.0f}, {cost.high:.0f}]", ""),
    ]


def worker_rows(
    model: Path, data: Path, place: Path, options: argparse.Namespace
) -> list[tuple[str, str, str]]:
    """Shards per second of one and of two workers, from the first finished shard to the last."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for number in range(options.rounds):
        for workers in (1, 2) if number % 2 else (2, 1):
            run = place / f"workers{workers}"
            shutil.rmtree(run, ignore_errors=True)
            rates[workers].append(
                rate(hw.corpus(model, data, out=run, shards=options.shards), workers)
            )
    gain = statistics.median(two / one for one, two in zip(rates[1], rates[2], strict=True))
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    return [
        ("one worker", f"{one:.2f} shards/s", "1"),
        ("two workers", f"{two:.2f} shards/s", f"{gain:.2f}"),
    ]


def rate(job: CorpusJob, workers: int) -> float:
    """Shards per second without the start of the processes."""
    times: list[float] = []
    job.run(workers=workers, on_progress=lambda done, total: times.append(time.perf_counter()))
    # The first shards are finished when all workers have begun; the last ones find them idle.
    return (len(times) - 1 - 2 * workers) / (times[-1 - workers] - times[workers])


if __name__ == "__main__":
    main()
