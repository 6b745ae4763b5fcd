"""What a watched attention call takes in Python: a tiny model, watched minus unwatched, by layer.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.host_time --into benchmarks/results/observing.md

A decoder of 24 layers with one head of 8 on 8 tokens, so that kernels take next to no time. Runs
alternate; tables are read every 50 passes, and by each call of `generate`.

Python keeps its stack in pieces of 16 KiB. A call that begins one takes 30 µs more, and slows down
what comes after it; which calls do depends on how deep the stack is. So runs are at many depths.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
import transformers

from benchmarks._report import Row, machine, parser_of, print_rows, show, table
from benchmarks.speed.short_watch import alternating
from headwise.watch import Watch, observe

LAYERS, WIDTH, TOKENS = 24, 8, 8
PASSES, NEW = 50, 20
CASES = "eager", "compiled", "generate"
Depths = dict[bool, Iterator[int]]
TITLES = "", "unwatched", "watched minus unwatched", "rounds"


@torch.no_grad()
def measured(options: argparse.Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=1, intermediate_size=WIDTH,
        vocab_size=32, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval().to(options.device)
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.randint(0, 32, (1, TOKENS), device=options.device)
    works: dict[str, Callable[[], Any]] = {
        "eager": partial(_several, model, ids),
        "compiled": partial(_several, compiled, ids),
        "generate": partial(model.generate, ids, max_new_tokens=NEW, do_sample=False),
    }
    for name in options.cases:
        depths = {is_watched: cycle(range(0, 180, 7)) for is_watched in (False, True)}

        def work(watch: Watch | None, name: str = name, depths: Depths = depths) -> None:
            _deeper(next(depths[watch is not None]), works[name])
            if watch:
                watch.table()

        if name == "compiled":  # and with a watch, whose first pass runs eager
            work(None)
            with observe(model) as watch:
                work(watch)
        times = alternating(work, partial(observe, model), options)
        passes = NEW if name == "generate" else PASSES
        calls, more = passes * LAYERS / 1000, times.difference("watched", "without")
        by_layer = [x / calls for x in (more.median, more.low, more.high)]
        yield {
            "case": name,
            "without": f"{times.median('without') / calls:.0f} µs",
            "more": "{:.0f} [{:.0f}, {:.0f}] µs".format(*by_layer),
            "rounds": str(len(times.seconds["without"])),
        }


def _several(model: Callable[..., Any], ids: torch.Tensor) -> None:
    for _ in range(PASSES):
        model(ids, use_cache=False)


def _deeper(depth: int, work: Callable[[], Any]) -> None:
    work() if depth == 0 else _deeper(depth - 1, work)


def main() -> None:
    parser = parser_of(__doc__, seconds=30.0, clock="cpu", device="cpu", threads=1)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = print_rows(measured(options))
    text = f"{machine(options)}.\n\n{table(TITLES, [list(row.values()) for row in rows])}"
    show(text, options.into, "host time")


if __name__ == "__main__":
    main()
