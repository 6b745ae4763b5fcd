"""How reliable comparisons of two models are: false alarms, and planted changes found.

    python -m benchmarks.evidence.comparison halves MODEL --pairs stsb-en-dev.csv --keep runs
    python -m benchmarks.evidence.comparison planted MODEL --pairs stsb-en-dev.csv --keep runs
    python -m benchmarks.evidence.comparison publish --keep runs \\
        --into benchmarks/results/comparing.md

`halves` splits texts of one model into two random halves, many times, and counts the comparisons
that name any difference: of halves as they are (independent texts), and of one half on which each
text's sums of the model and of a changed model are swapped at random (the same texts, no
difference on average). `planted` changes one head at a time and looks for it.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from torch import nn

import headwise as hw
from benchmarks._report import insert, table
from headwise.corpora import read_pairs
from headwise.models.texts import token_classes
from headwise.report import compare_tables
from headwise.tables import HeadTable, Totals
from headwise.watch import DEFAULT

POOL = 360  # texts that halves are drawn from
PLANTED_TEXTS = (32, 64)
Row = dict[str, Any]


def read(path: str, n: int) -> list[str]:
    """The first distinct sentences of a file of pairs."""
    sentences = dict.fromkeys(pair.one for pair in read_pairs(Path(path)))
    return list(sentences)[:n]


def measured(model: nn.Module, tokenizer: Any, texts: list[str]) -> HeadTable:
    classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
    request = hw.Request((*DEFAULT, "output_norm"), classes=classes, per_text=True)
    return hw.study(model, texts, tokenizer=tokenizer, request=request).table


def of_rows(table: HeadTable, other: HeadTable, swapped: np.ndarray, rows: np.ndarray) -> HeadTable:
    """The table of some texts; those that are swapped come from the other table."""
    totals = {}
    for name, sums in table.totals.items():
        pairs = zip(table.per_text(name).parts, other.per_text(name).parts, strict=True)
        parts = (np.where(swapped[:, None], second, first)[rows] for first, second in pairs)
        count, total, uniform = parts
        totals[name] = Totals.of_texts(total, count, sums.maximum, uniform, keep=True)
    return replace(table, totals=totals)


def halves(options: argparse.Namespace) -> Iterator[Row]:
    """The rate of comparisons that name a difference where there is none."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    texts = read(options.pairs, POOL)
    table, changed = (measured(m, tokenizer, texts) for m in (model, noisy(model)))
    for paired in (False, True):
        for size in options.sizes:
            alarms = 0
            for draw in range(options.draws):
                rng = np.random.default_rng([size, draw, paired])
                order = rng.permutation(len(texts))
                swapped = rng.random(len(texts)) < 0.5
                if paired:
                    rows = order[:size], order[:size]
                    sides = (
                        of_rows(table, changed, swapped, rows[0]),
                        of_rows(table, changed, ~swapped, rows[1]),
                    )
                else:
                    none = np.zeros(len(texts), bool)
                    sides = (
                        of_rows(table, table, none, order[:size]),
                        of_rows(table, table, none, order[size : 2 * size]),
                    )
                result = compare_tables(*sides, draws=options.resamples)
                alarms += len(result.changed()) > 0
            low, high = binomtest(alarms, options.draws).proportion_ci(method="wilson")
            yield {
                "model": Path(options.model).parent.name or options.model,
                "texts": "the same, swapped at random" if paired else "halves",
                "size": size,
                "tests": int(len(table.heads) * len(table.statistics)),
                "draws": options.draws,
                "rate": alarms / options.draws,
                "low": low,
                "high": high,
            }


def noisy(model: nn.Module) -> nn.Module:
    """A copy with a little noise on every matrix, as after a short fine-tuning."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def attention_of(model: nn.Module, layer: int) -> dict[str, nn.Linear]:
    """The projections of a layer of a Llama or a BERT."""
    inner: Any = model
    if hasattr(inner, "model"):
        attention = inner.model.layers[layer].self_attn
        return {part: getattr(attention, f"{part}_proj") for part in "qkvo"}
    attention = inner.encoder.layer[layer].attention
    names = {"q": "query", "k": "key", "v": "value"}
    linear = {part: getattr(attention.self, name) for part, name in names.items()}
    return {**linear, "o": attention.output.dense}


def rows_of(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


@torch.no_grad()
def scaled(factor: float, model: nn.Module, layer: int, head: int, width: int) -> list[int]:
    query = attention_of(model, layer)["q"]
    query.weight[rows_of(head, width)] *= factor
    if query.bias is not None:
        query.bias[rows_of(head, width)] *= factor
    return [head]


@torch.no_grad()
def zeroed(model: nn.Module, layer: int, head: int, width: int) -> list[int]:
    attention_of(model, layer)["o"].weight[:, rows_of(head, width)] = 0
    return [head]


@torch.no_grad()
def swapped_heads(model: nn.Module, layer: int, head: int, width: int) -> list[int]:
    """Swap a head with its neighbor, which reads the same keys and values if they are shared."""
    linear = attention_of(model, layer)
    own = linear["k"].weight.shape == linear["q"].weight.shape
    first, second = rows_of(head, width), rows_of(head ^ 1, width)
    for part in ("q", "k", "v") if own else ("q",):
        for tensor in (linear[part].weight, linear[part].bias):
            if tensor is not None:
                tensor[first], tensor[second] = tensor[second].clone(), tensor[first].clone()
    out = linear["o"].weight
    out[:, first], out[:, second] = out[:, second].clone(), out[:, first].clone()
    return [head, head ^ 1]


CHANGES: dict[str, Callable[..., list[int]]] = {
    "W_q × 1.25": partial(scaled, 1.25),
    "W_q × 0.9": partial(scaled, 0.9),
    "two heads swapped": swapped_heads,
    "output zeroed": zeroed,
}


def planted(options: argparse.Namespace) -> Iterator[Row]:
    """How often a changed head is found, and heads that cannot have changed are named."""
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    config: Any = model.config
    width = config.hidden_size // config.num_attention_heads
    rng = np.random.default_rng(0)
    for size in PLANTED_TEXTS:
        texts = read(options.pairs, size)
        table = measured(model, tokenizer, texts)
        for name, change in CHANGES.items():
            found = expected = wrong = 0
            for _ in range(options.heads):
                layer = int(rng.integers(config.num_hidden_layers))
                head = int(rng.integers(config.num_attention_heads))
                after = copy.deepcopy(model)
                heads = {f"L{layer}.H{h}" for h in change(after, layer, head, width)}
                result = compare_tables(
                    table, measured(after, tokenizer, texts), draws=options.resamples
                )
                changed = set(result.changed()["name"])
                upstream = {x for x in changed if hw.Head.parse(x).layer <= layer} - heads
                found, expected = found + len(heads & changed), expected + len(heads)
                wrong += len(upstream)
            yield {
                "model": Path(options.model).parent.name or options.model,
                "change": name,
                "texts": size,
                "found": found,
                "of": expected,
                "wrong": wrong,
            }


def run(options: argparse.Namespace) -> None:
    """Measure, keeping every row as soon as it is there."""
    rows: list[Row] = []
    folder = Path(options.keep)
    folder.mkdir(exist_ok=True)
    for row in {"halves": halves, "planted": planted}[options.command](options):
        print(row, flush=True)
        rows.append(row)
        name = f"{options.command}-{row['model']}.json"
        (folder / name).write_text(json.dumps(rows, indent=1), "utf-8")


def publish(options: argparse.Namespace) -> None:
    kept = {
        kind: [row for path in sorted(Path(options.keep).glob(f"{kind}-*.json"))
               for row in json.loads(path.read_text("utf-8"))]
        for kind in ("halves", "planted")
    }  # fmt: skip
    alarms = table(
        ("model", "texts", "texts a side", "tests", "comparisons", "false alarms", "95 % interval"),
        [
            (r["model"], r["texts"], r["size"], f"{r['tests']:,}", r["draws"], f"{r['rate']:.1%}",
             f"{r['low']:.1%} to {r['high']:.1%}")
            for r in kept["halves"]
        ],
        2,
    )  # fmt: skip
    found = table(
        ("model", "change of one head", "texts", "changed heads found", "others named"),
        [
            (r["model"], r["change"], r["texts"], f"{r['found']} of {r['of']}", r["wrong"])
            for r in kept["planted"]
        ],
        2,
    )
    insert(f"{alarms}\n\n{found}", options.into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("halves", "planted"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument("--pairs", required=True)
        command.add_argument("--keep", required=True)
        command.add_argument("--resamples", type=int, default=2000)
        command.add_argument("--draws", type=int, default=800)
        command.add_argument("--sizes", type=int, nargs="+", default=[30, 60])
        command.add_argument("--heads", type=int, default=12)
    command = commands.add_parser("publish")
    command.add_argument("--keep", required=True)
    command.add_argument("--into", required=True)
    options = parser.parse_args()
    publish(options) if options.command == "publish" else run(options)


if __name__ == "__main__":
    main()
