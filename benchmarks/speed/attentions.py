"""Time and memory of attention weights: `output_attentions` beside `hw.attentions`.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.attentions --into benchmarks/results/observing.md

A Llama of four layers with eight heads each, with random weights, on one text. Each way runs in a
process of its own, because peak memory is that of the process.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from benchmarks._report import cpu_name, parser_of, peak_of, show, software, table

LAYERS, HEADS, WIDTH, VOCABULARY = 4, 8, 64, 1000
EAGER, LAST, ONE, ALL = "eager", "last", "one", "all"
WAYS = {
    EAGER: 'model(**inputs, output_attentions=True), `"eager"`',
    ALL: "hw.attentions(model, inputs)",
    ONE: 'hw.attentions(model, inputs, heads="L2.H3")',
    LAST: "hw.attentions(model, inputs, queries=-1)",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=(2048, 4096))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help="measure a way at a length in this process")
    options = parser.parse_args()
    if options.one:
        print(*measure(options.one[0], int(options.one[1])))
        return
    rows = [row for tokens in options.lengths for row in rows_of(tokens, options.rounds)]
    titles = ("tokens", "way", "CPU time", "of eager", "peak memory beyond the model")
    threads = torch.get_num_threads()
    where = f"{software()}, {cpu_name()}, {'one thread' if threads == 1 else f'{threads} threads'}"
    show(f"{where}.\n\n{table(titles, rows, 2)}", options.into, "attentions")


def rows_of(tokens: int, rounds: int) -> list[tuple[str, ...]]:
    """A row for each way, whose runs alternate."""
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, "-m", __spec__.name, "--one", way, str(tokens)]
            seconds, peak = map(float, subprocess.check_output(command, text=True).split())
            measured[way].append((seconds, peak))
    middle = {way: [statistics.median(x) for x in zip(*measured[way], strict=True)] for way in WAYS}
    eager = middle[EAGER][0]
    return [
        (f"{tokens:,}", WAYS[way], f"{seconds:.2f} s", f"{seconds / eager:.2f}",
         f"{peak / 2**20:,.0f} MiB")
        for way, (seconds, peak) in middle.items()
    ]  # fmt: skip


@torch.no_grad()
def measure(way: str, tokens: int) -> tuple[float, int]:
    """Seconds of CPU time and peak bytes of one way."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HEADS * WIDTH, intermediate_size=4 * HEADS * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=tokens, attn_implementation="eager" if way == EAGER else "sdpa",
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().model
    inputs = {"input_ids": torch.randint(VOCABULARY, (1, tokens))}
    works: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        EAGER: lambda inputs: model(**inputs, output_attentions=True).attentions,
        ALL: lambda inputs: hw.attentions(model, inputs, max_bytes=1 << 40),
        ONE: lambda inputs: hw.attentions(model, inputs, heads="L2.H3"),
        LAST: lambda inputs: hw.attentions(model, inputs, queries=-1),
    }
    works[way]({"input_ids": inputs["input_ids"][:, :64]})  # what is allocated once
    started = time.process_time()
    peak = peak_of(lambda: works[way](inputs))
    return time.process_time() - started, peak


if __name__ == "__main__":
    main()
