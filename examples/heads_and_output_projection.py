"""Do several heads help a model, and does `W_O`? A small study to repeat at home.

It trains Mini-GPTs that differ only in the number of heads and in the output projection `W_O` of
their attention layers: initialised at random as usual, initialised as the identity, or left out.
Width, layers and lines are the same, and for each seed all other initial weights too. Results are
written after every run, and the same command continues from there:

    python examples/heads_and_output_projection.py --out heads-study.json
"""

import argparse
import itertools
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.corpora import EOS, PAD
from headwise.files import write_beside
from headwise.lab import MiniGPT, TrainSettings, evaluate, make_tokenizer

Row = dict[str, Any]
KEY = ("n_heads", "W_O", "seed")
FORMS = ("drawn", "identity", "none")
MEASURES = {"loss": "{:.3f}", "conjugation": "{:.0%}", "translation": "{:.0%}"}


def train_and_evaluate(settings: TrainSettings, *, W_O: str, lines: int) -> Row:
    """Train one model, and evaluate it on pairs of verb and pronoun that were held out."""
    started = process_time()
    grammar = settings.grammar()
    tokenizer = make_tokenizer(grammar.vocabulary)
    padding = grammar.vocabulary.index(PAD)
    model = make_model(settings, W_O)
    decay = settings.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay, fused=True)
    for step, ids in enumerate(batches(settings)):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        logits, targets = model(ids[:, :-1]), ids[:, 1:]
        loss = functional.cross_entropy(logits.mT, targets, ignore_index=padding)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scores = evaluate(model, grammar, tokenizer=tokenizer, lines=lines, seed=settings.seed).held_out
    return {
        "loss": scores.loss,
        "conjugation": scores.conjugation,
        "translation": scores.translation,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seconds": round(process_time() - started, 1),
    }


def make_model(settings: TrainSettings, W_O: str) -> MiniGPT:
    """A model whose other initial weights depend on the seed alone, not on heads or `W_O`."""
    torch.manual_seed(settings.seed)
    model = MiniGPT(settings.config(len(settings.grammar().vocabulary)))
    for block in model.blocks:
        if W_O == "identity":
            nn.init.eye_(block.attention.out_proj.weight)
        elif W_O == "none":
            # The heads are concatenated: each writes to features of its own.
            block.attention.out_proj = nn.Identity()
    return model


def batches(settings: TrainSettings) -> Iterator[Tensor]:
    """One batch of lines per step, which depends on the seed alone."""
    grammar = settings.grammar()
    tokenizer = make_tokenizer(grammar.vocabulary)
    tokenizer.enable_padding(pad_id=grammar.vocabulary.index(PAD), pad_token=PAD)
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.steps):
        lines = [f"{grammar.line(rng)} {EOS}" for _ in range(settings.batch_size)]
        yield torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(lines)])


def run(options: argparse.Namespace) -> list[Row]:
    """Run every combination of heads, `W_O` and seed that is not in the file yet."""
    names = ("d_model", "n_layers", "steps", "batch_size", "learning_rate")
    # Sentences only: models of this size do not learn to copy random words.
    common = TrainSettings(repeat_share=0.0, **{name: getattr(options, name) for name in names})
    requested = asdict(common) | {"lines_judged": options.lines}
    del requested["seed"], requested["n_heads"]
    rows = read(options.out, requested)
    done = {tuple(row[name] for name in KEY) for row in rows}
    # Seed by seed, so that early results already cover every kind of model.
    for seed, n_heads, W_O in itertools.product(options.seeds, options.heads, options.W_O):
        if (n_heads, W_O, seed) in done:
            continue
        settings = replace(common, seed=seed, n_heads=n_heads)
        row = train_and_evaluate(settings, W_O=W_O, lines=options.lines)
        rows.append(dict(zip(KEY, (n_heads, W_O, seed), strict=True)) | row)
        write(options.out, requested, rows)
    return rows


def read(path: Path, requested: Row) -> list[Row]:
    """The runs in a file, if they were made with these settings."""
    if not path.exists():
        return []
    saved = json.loads(path.read_text("utf-8"))
    if saved["settings"] != requested:
        raise SystemExit(f"{path} holds runs with {saved['settings']}. Choose another file.")
    return list(saved["runs"])


def write(path: Path, requested: Row, rows: Sequence[Row]) -> None:
    """Write all runs so far, with their settings and the machine."""
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    with write_beside(path) as beside:
        saved = {"settings": requested, "machine": machine, "runs": rows}
        beside.write_text(json.dumps(saved, indent=1) + "\n", "utf-8")


def table(rows: Sequence[Row]) -> str:
    """A row per kind of model: the mean over the seeds, with the lowest and highest in brackets."""
    lines = [
        "| heads | W_O | parameters | loss | conjugation | translation |",
        "|--:|:--|--:|--:|--:|--:|",
    ]
    for n_heads, W_O in sorted({(row["n_heads"], row["W_O"]) for row in rows}):
        group = [row for row in rows if (row["n_heads"], row["W_O"]) == (n_heads, W_O)]
        cells = [str(n_heads), W_O, f"{group[0]['parameters']:,}"]
        for name, form in MEASURES.items():
            values = [row[name] for row in group]
            shown = map(form.format, (statistics.mean(values), min(values), max(values)))
            cells.append("{} ({}–{})".format(*shown))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(rows: Sequence[Row], by: str) -> str:
    """The effect of one choice, all else equal: the mean change, and how often it is positive."""
    values = sorted({row[by] for row in rows})
    others = [name for name in KEY if name != by]
    runs = {(row[by], *(row[name] for name in others)): row for row in rows}
    lines = [f"| {by} | loss | conjugation | translation |", "|:--|--:|--:|--:|"]
    for value in values[1:]:
        pairs = [
            (runs[choice, *key], runs[values[0], *key])
            for choice, *key in runs
            if choice == value and (values[0], *key) in runs
        ]
        cells = [f"{value}, not {values[0]}"]
        for name in MEASURES:
            changes = [changed[name] - base[name] for changed, base in pairs]
            up = sum(change > 0 for change in changes)
            cells.append(f"{statistics.mean(changes):+.3f} ({up} of {len(changes)} up)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the study; the defaults give the published one."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("heads-study.json"))
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--W_O", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2, dest="n_layers")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16, dest="batch_size")
    parser.add_argument("--lr", type=float, default=6e-3, dest="learning_rate")
    parser.add_argument("--lines", type=int, default=512, help="lines to evaluate each model on")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing combinations, write them, and print the tables."""
    rows = run(parse(arguments))
    print(table(rows), compare(rows, "W_O"), compare(rows, "n_heads"), sep="\n\n")


if __name__ == "__main__":
    main()
