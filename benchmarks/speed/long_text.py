"""Time and memory of watching one long text: two layers of four heads.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.long_text --into benchmarks/results/corpus-jobs.md

Each length runs in a process of its own, because peak memory is that of the process. The time grows
with the square of the text, the memory with the text.
"""

import subprocess
import sys
import time

import torch

import headwise as hw
from benchmarks._report import cpu_name, parser_of, peak_of, show, software, table

LENGTHS = (16384, 32768, 65536)
HEADS, WIDTH = 4, 16


class TwoLayers(torch.nn.Module):
    """Two causal layers of four heads, as a Llama has them, without its other parts."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.layers = torch.nn.ModuleList(
            hw.MultiHeadAttention(size, HEADS, rope=hw.RoPE(WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, causal=True)
        return x


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--one", type=int, help="watch one text of this length in this process")
    options = parser.parse_args()
    if options.one:
        print(*measure(options.one))
        return
    rows = []
    for tokens in options.lengths:
        command = [sys.executable, "-m", __spec__.name, "--one", str(tokens)]
        seconds, peak = map(float, subprocess.check_output(command, text=True).split())
        rows.append((f"{tokens:,}", f"{seconds:.1f} s", f"{peak / 2**20:.0f} MiB",
                     f"{peak / tokens:.0f}"))  # fmt: skip
        print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
    titles = ("tokens", "CPU time", "peak memory beyond the model", "bytes per token")
    threads = torch.get_num_threads()
    where = f"{software()}, {cpu_name()}, {'one thread' if threads == 1 else f'{threads} threads'}"
    text = f"{where}.\n\n{table(titles, rows)}"
    show(text, options.into, "length")


def measure(tokens: int) -> tuple[float, int]:
    """Seconds of CPU time and peak bytes of watching one text."""
    torch.manual_seed(0)
    model = TwoLayers().eval()
    watch_text(model, 512)  # what is allocated once
    started = time.process_time()
    peak = peak_of(lambda: watch_text(model, tokens))
    return time.process_time() - started, peak


@torch.no_grad()
def watch_text(model: torch.nn.Module, tokens: int) -> None:
    x = torch.randn(1, tokens, HEADS * WIDTH)
    with hw.observe(model) as watch:
        model(x)
    rows = watch.table().count("entropy")
    if (rows != tokens - 1).any():
        raise SystemExit(f"{rows} rows of {tokens} tokens were counted")


if __name__ == "__main__":
    main()
