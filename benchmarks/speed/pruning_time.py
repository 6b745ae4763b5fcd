"""How much faster attention gets when heads are removed.

    python -m benchmarks.speed.pruning_time MODEL ... --threads 1 --clock cpu \\
        --into benchmarks/results/smaller.md
    python -m benchmarks.speed.pruning_time --threads 1 --clock cpu --passes 9 \\
        --into benchmarks/results/smaller.md
    python -m benchmarks.speed.pruning_time --device cuda --dtype bfloat16

A quarter, a half and three quarters of the heads (whole groups, if heads come in groups) are
removed from each MODEL; without a MODEL, from a random model of BERT's size and one with the groups
of Llama. The table shows the time of all attention blocks (projections, attention, output
projection) and of whole passes. The models run in turn.
"""

import argparse
from collections.abc import Iterator

import torch
import transformers
from torch import nn

import headwise as hw
from benchmarks._report import machine, parser_of, show, table
from benchmarks._timing import CLOCKS
from headwise.surgery import time_passes

SHARES = (0.25, 0.5, 0.75)
TITLES = ["model", "heads gone", "blocks, ms", "of the full", "whole pass, ms", "of the full"]


def models(folders: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The named models, or two random ones; few layers suffice, since each block takes the same."""
    for folder in folders:
        model = hw.load(folder)
        yield type(model).__name__, model
    if not folders:
        torch.manual_seed(0)
        bert = transformers.BertConfig(num_hidden_layers=4)
        llama = transformers.LlamaConfig(
            hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
            intermediate_size=2816, vocab_size=8192,
        )  # fmt: skip
        yield "BertModel, random", transformers.BertModel(bert)
        yield "LlamaModel, random", transformers.LlamaModel(llama)


def without(model: nn.Module, share: float) -> nn.Module:
    """The model without the last heads of every layer."""
    heads: int = model.config.num_attention_heads
    removed = range(round((1 - share) * heads), heads)
    return hw.prune(
        model, {layer: list(removed) for layer in range(model.config.num_hidden_layers)}
    )


def rows(name: str, model: nn.Module, options: argparse.Namespace) -> Iterator[list[str]]:
    model.eval().to(options.device, getattr(torch, options.dtype))
    ids = torch.randint(100, (options.texts, options.tokens), device=options.device)
    config = model.config
    name += f", {config.num_attention_heads} heads, width {config.hidden_size}"
    variants = [model, *(without(model, share) for share in SHARES)]
    all_times = time_passes(variants, {"input_ids": ids}, options.passes, CLOCKS[options.clock])
    for share, times in zip((0.0, *SHARES), all_times, strict=True):
        cells = []
        for seconds, full in (
            (sum(times.blocks), sum(all_times[0].blocks)),
            (times.whole, all_times[0].whole),
        ):
            cells += [f"{1000 * seconds:.1f}", f"{seconds / full:.2f}"]
        yield [name, f"{100 * share:.0f} %", *cells]


def main() -> None:
    parser = parser_of(__doc__, device="cpu", threads=torch.get_num_threads(), clock="wall")
    parser.add_argument("model", nargs="*")
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cells = [row for name, model in models(options.model) for row in rows(name, model, options)]
    about = (
        f"Medians of {options.passes} passes over {options.texts} texts of "
        f"{options.tokens} tokens, {options.dtype}; {machine(options)}."
    )
    text = f"{about}\n\n{table(TITLES, cells, 1)}"
    show(text, options.into, "" if options.model else "random models")


if __name__ == "__main__":
    main()
