"""What cutting a corpus into shards costs.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.corpus_sharding \\
        --into benchmarks/results/corpus-jobs.md

The time of a job of many shards, the model already open, to that of one shard of the same texts,
in paired rounds; what they take more, divided by their number, is what a shard costs besides its
texts.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table
from benchmarks._timing import Paired, interleaved
from benchmarks.speed._corpus import write_corpus, write_model


def main() -> None:
    parser = parser_of(__doc__, rounds=5, clock="cpu")
    parser.add_argument("--bytes", type=int, default=250_000)
    parser.add_argument("--shards", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = write_model(place / "model", width=256)
        data = write_corpus(place / "data.jsonl", options.bytes)
        rows = overhead_rows(model, data, place, options)
    text = f"{software()}, {cpu_name()}, one thread a process.\n\n" + table(
        ("", "time", "ratio"), rows
    )
    show(text, options.into, "sharding")


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


if __name__ == "__main__":
    main()
