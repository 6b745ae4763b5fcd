"""How much faster attention is when heads are gone.

    python benchmarks/pruning_time.py MODEL ... --threads 1 --clock cpu --into docs/smaller.md
    python benchmarks/pruning_time.py --device cuda --dtype bfloat16

Each MODEL, or without any one of the sizes of BERT and one with the groups of Llama, their weights
drawn at random, loses a quarter, a half and three quarters of its heads, where they come in groups
whole groups. Told is the time of all attention blocks (projections, attention, the way back), and
that of whole passes, as `headwise prune --time` measures them. The models take turns.
"""

import argparse
from collections.abc import Iterator

import torch
import transformers
from _telling import insert, table
from _timing import CLOCKS
from torch import nn

import headwise as hw
from headwise.surgery import time_passes

SHARES = (0.25, 0.5, 0.75)
TITLES = ["model", "heads gone", "blocks, ms", "of the full", "whole pass, ms", "of the full"]


def models(folders: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Those given, or two of few layers: a block takes the same time however many there are."""
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
    gone = range(round((1 - share) * heads), heads)
    return hw.prune(model, {layer: list(gone) for layer in range(model.config.num_hidden_layers)})


def rows(name: str, model: nn.Module, asked: argparse.Namespace) -> Iterator[list[str]]:
    model.eval().to(asked.device, getattr(torch, asked.dtype))
    ids = torch.randint(100, (asked.texts, asked.tokens), device=asked.device)
    config = model.config
    name += f", {config.num_attention_heads} heads, width {config.hidden_size}"
    some = [model, *(without(model, share) for share in SHARES)]
    times = time_passes(some, {"input_ids": ids}, asked.passes, CLOCKS[asked.clock])
    for share, one in zip((0.0, *SHARES), times, strict=True):
        told = []
        for taken, of in ((sum(one.blocks), sum(times[0].blocks)), (one.whole, times[0].whole)):
            told += [f"{1000 * taken:.1f}", f"{taken / of:.2f}"]
        yield [name, f"{100 * share:.0f} %", *told]


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("model", nargs="*")
    reader.add_argument("--passes", type=int, default=15)
    reader.add_argument("--tokens", type=int, default=256)
    reader.add_argument("--texts", type=int, default=2)
    reader.add_argument("--device", default="cpu")
    reader.add_argument("--dtype", default="float32")
    reader.add_argument("--threads", type=int, default=torch.get_num_threads())
    reader.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu where it is busy")
    reader.add_argument("--into", help="a page to put the table into")
    asked = reader.parse_args()
    torch.set_num_threads(asked.threads)
    told = [row for name, model in models(asked.model) for row in rows(name, model, asked)]
    about = (
        f"Medians of {asked.passes} passes over {asked.texts} texts of {asked.tokens} tokens, "
        f"{asked.dtype}, {asked.device}, {asked.threads} threads, {asked.clock} clock, "
        f"torch {torch.__version__}."
    )
    text = f"{about}\n\n{table(TITLES, told, 1)}"
    print(text)
    if asked.into:
        insert(text, asked.into)


if __name__ == "__main__":
    main()
