"""What 16 spans add to a default watch.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.spans --into benchmarks/results/observing.md

A Llama of 4 layers with 8 heads of 64 (2 key/value heads) reads texts under `observe`: with a
default request, and with 16 named stretches of each text in addition, for all queries and for the
last 32. Every ratio is the median of ratios of neighboring runs, on one thread.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import transformers

import headwise as hw
from benchmarks._report import Row, machine, parser_of, print_rows, show, table
from benchmarks._timing import interleaved, rounds_for

SIZES = {"1 x 2048": (1, 2048), "2 x 512": (2, 512), "8 x 128": (8, 128)}
SPANS = 16
TITLES = ("texts", "watch", "took", "ratio to the default watch", "rounds")


def main() -> None:
    options = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = print_rows(_rows(options))
    text = f"{machine(options)}.\n\n{table(TITLES, [list(row.values()) for row in rows])}"
    show(text, options.into, "spans")


@torch.no_grad()
def _rows(options: argparse.Namespace) -> Iterator[Row]:
    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1024, vocab_size=1000,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    for name, (B, T) in SIZES.items():
        ids = torch.randint(0, 1000, (B, T))
        width = (T - 32) // SPANS
        stretches = {f"span{n}": [(n * width, (n + 1) * width)] * B for n in range(SPANS)}

        def run(
            request: hw.Request,
            queries: object = None,
            ids: torch.Tensor = ids,
            stretches: dict[str, list[tuple[int, int]]] = stretches,
        ) -> None:
            with hw.observe(model, request) as watch:
                for _ in range(options.passes):
                    if request.spans:
                        watch.spans(**stretches, queries=queries)
                    model(ids)
                watch.table()

        spans = hw.Request(spans=tuple(stretches))
        works = {
            "default": partial(run, hw.Request()),
            "16 spans": partial(run, spans),
            "16 spans, 32 queries": partial(run, spans, [(T - 32, T)] * B),
        }
        rounds = rounds_for(works, options.seconds)
        times = interleaved(works, rounds, options.clock, is_warm=True)
        for work in works:
            ratio = "1" if work == "default" else str(times.ratio(work, "default"))
            yield {
                "texts": name, "watch": work, "took": f"{times.median(work):.1f} ms",
                "ratio": ratio, "rounds": rounds,
            }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seconds=60.0, clock="cpu")
    parser.add_argument("--passes", type=int, default=3, help="passes in each watch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
