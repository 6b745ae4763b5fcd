"""Texts per second of two workers of Ray beside one process, and memory of a worker.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.batches --part throughput \\
        --into benchmarks/results/batches.md

A Llama of 4 layers with 8 heads of 32 reads texts of 40 words. Rates count from the first row of a
worker to the last, so that the start of Ray and of the models, told apart, is left out; rounds
alternate. Memory is that of one process over 100,000 texts of a tiny Llama, after each tenth.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
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
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--texts", type=int, help="texts of a round, or of the whole for memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure, texts = PARTS[options.part]
    with tempfile.TemporaryDirectory() as place:
        text = measure(Path(place), options.texts or texts, options.rounds)
    show(f"{cpu_name()}, {software()}. {text}", options.into, options.part)


def throughput(place: Path, n_texts: int, rounds: int) -> str:
    """Texts per second in one process and in two workers, in alternating rounds."""
    model = _write_model(place, LARGE)
    rates: dict[str, list[float]] = {"one process": [], "two workers of Ray": []}
    ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    starts = []
    for _ in range(rounds):
        texts = [*_texts(n_texts)]
        rates["one process"].append(_rate(_alone(model, texts))[0])
        rate, start = _rate(_workers(model, texts))
        rates["two workers of Ray"].append(rate)
        starts.append(start)
    ray.shutdown()
    one, two = rates.values()
    ratio = median(b / a for a, b in zip(one, two, strict=True))
    rows = [[name, f"{median(found):.0f}"] for name, found in rates.items()]
    return (
        f"{n_texts:,} texts in batches of {BATCH}, {rounds} rounds.\n\n"
        f"{table(('', 'texts per second'), rows)}\n\nTwo workers over one process: "
        f"**{ratio:.2f}**. The first row of Ray came after {median(starts):.0f} s."
    )


def memory(place: Path, n_texts: int, _: int) -> str:
    """The memory of this process after each tenth of the texts; Linux only."""
    model, rows, done, total = _write_model(place, SMALL), [], 0, None
    for row in _alone(model, _texts(n_texts)):
        part = hw.HeadTable.sum([row])
        total = part if total is None else total + part
        done += BATCH
        if done // (n_texts // 10) > len(rows):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            rows.append([f"{done:,}", f"{pages * resource.getpagesize() / 2**20:.0f}"])
    return f"Batches of {BATCH}.\n\n{table(('texts', 'MiB of the process'), rows)}"


# What is measured, and the texts that it needs.
PARTS: dict[str, tuple[Callable[[Path, int, int], str], int]] = {
    "throughput": (throughput, 2048),
    "memory": (memory, 100_000),
}


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


if __name__ == "__main__":
    main()
