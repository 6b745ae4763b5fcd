"""Texts per second of two workers of Ray beside one process, and memory of a worker.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.batches --into benchmarks/results/batches.md

A Llama of 4 layers with 8 heads of 32 reads texts of 40 words. Rates count from the first row of a
worker to the last, so that the start of Ray and of the models, told apart, is left out; rounds
alternate. Memory is that of one process over 100,000 texts of a tiny Llama, after each tenth.
"""

import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headwise as hw
from benchmarks._report import cpu_name, parser_of, show, software, table

WORDS = ["[PAD]", *(f"w{number}" for number in range(400))]
BATCH, WORKERS = 64, 2
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
LARGE = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4}


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--texts", type=int, default=4096, help="texts of a round")
    parser.add_argument("--memory-texts", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        large, small = _write_model(Path(place, "a"), LARGE), _write_model(Path(place, "b"), SMALL)
        rates: dict[str, list[float]] = {"one process": [], "two workers of Ray": []}
        ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        starts = []
        for _ in range(options.rounds):
            texts = [*_texts(options.texts)]
            rates["one process"].append(_rate(_alone(large, texts))[0])
            rate, start = _rate(_workers(large, texts))
            rates["two workers of Ray"].append(rate)
            starts.append(start)
        ray.shutdown()
        memory = _memory(small, options.memory_texts)
    one, two = rates.values()
    ratio = median(b / a for a, b in zip(one, two, strict=True))
    rows = [[name, f"{median(found):.0f}"] for name, found in rates.items()]
    growth = [[f"{texts:,}", f"{mib:.0f}"] for texts, mib in memory]
    show(
        f"{cpu_name()}, {software()}. {options.texts:,} texts in batches of {BATCH}, "
        f"{options.rounds} rounds.\n\n{table(('', 'texts per second'), rows)}\n\n"
        f"Two workers over one process: **{ratio:.2f}**. The first row of Ray came after "
        f"{median(starts):.0f} s.\n\n{table(('texts', 'MiB of the process'), growth)}",
        options.into,
    )


def _write_model(folder: Path, sizes: dict[str, int]) -> str:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), intermediate_size=2 * sizes["hidden_size"], **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _texts(count: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    return (" ".join(rng.choice(WORDS[1:], 40)) for _ in range(count))


def _alone(model: str, texts: Iterable[str]) -> Iterator[Any]:
    observer, rest = hw.BatchObserver(model), iter(texts)
    while batch := [*islice(rest, BATCH)]:
        yield observer({"text": batch})


def _workers(model: str, texts: list[str]) -> Iterator[Any]:
    rows = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=32)
    tables = rows.map_batches(
        hw.BatchObserver,
        fn_constructor_kwargs={"model": model},
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
        num_cpus=0.5,
    )
    return iter(tables.iter_rows())


def _rate(rows: Iterator[Any]) -> tuple[float, float]:
    """Texts per second after the first `WORKERS` rows, and the seconds until then."""
    begin = time.perf_counter()
    for _ in islice(rows, WORKERS):
        pass
    first = time.perf_counter()
    count = sum(1 for _ in rows)
    return count * BATCH / (time.perf_counter() - first), first - begin


def _memory(model: str, count: int) -> list[tuple[int, float]]:
    """The peak memory of this process, in MiB, after each tenth of the texts."""
    points, done, total = [], 0, None
    for row in _alone(model, _texts(count)):
        part = hw.HeadTable.sum([row])
        total = part if total is None else total + part
        done += BATCH
        if done // (count // 10) > len(points):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            points.append((done, peak))
    return points


if __name__ == "__main__":
    main()
