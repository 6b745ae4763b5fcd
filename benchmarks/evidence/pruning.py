"""What a model loses as heads are removed, in each order of importance and in random ones.

    python -m benchmarks.evidence.pruning measure MODEL --pairs stsb-en-dev.csv --keep minilm \\
        --recover 20
    python -m benchmarks.evidence.pruning measure MODEL --trees dev.conllu --keep treebank \\
        --redraw 10
    python -m benchmarks.evidence.pruning measure MODEL --coref gap.tsv --keep paragraphs \\
        --redraw 10
    python -m benchmarks.evidence.pruning measure MODEL --text stories.txt --keep babyllama \\
        --recover 20
    python -m benchmarks.evidence.pruning measure MINIGPT --grammar --keep minigpt
    python -m benchmarks.evidence.pruning measure FOLDER --language attractors --keep attractors
    python -m benchmarks.evidence.pruning publish minilm babyllama \\
        --into benchmarks/results/pruning.md

With sentence pairs (two sentences and their similarity per row, no header) the loss measures how
far embeddings move, and Spearman's correlation with the similarities is reported too; with a corpus
of trees or of coreference, of which the text alone is read, it measures how far embeddings move.
With texts, separated by `<|endoftext|>`, it is the loss of the language model: all of them are used
for evaluation, and heads are scored and models recovered on texts that the full model generates.
With `--grammar` the model is a Mini-GPT, and all texts are fresh lines of its grammar. With
`--language` it is an encoder that is trained on a generated language and saved in the folder, and
all texts are other sentences with one masked word. `--redraw` measures orders from other draws of
the scored texts, so that an interval of the elbow covers those too.

Scores and curves are stored in a folder, and existing ones are not measured again: first the curves
without recovery, then one for each method whose smaller models are trained towards the full one.
`publish` writes the tables into the page and draws a picture of each folder next to it.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import headwise as hw
from benchmarks._report import insert
from benchmarks.evidence._pruning_material import Material, encoder_in, preparation
from benchmarks.evidence._pruning_tables import (
    ELSEWHERE,
    PLAIN,
    RANDOM,
    RECOVERED,
    REDRAWN,
    ModelCurves,
    agreement,
)
from headwise.files import write_beside
from headwise.recovery import recovering
from headwise.scoring import Gates
from headwise.tables import Curves, random_orders, save_figure

# The method and the number of rounds of each order.
METHODS = {
    "half-gate": ("half-gate", 1),
    "half-gate, 9 rounds": ("half-gate", 9),
    "gradient": ("gradient", 1),
    "curvature": ("curvature", 1),
    "ablation": ("ablation", 1),
    "zero-ablation": ("zero-ablation", 1),
    "gates": (Gates(steps=120, seeds=2), 1),
}
# Methods that do not apply to a kind of loss.
SILENT = {"embedding": {"gradient"}, "lm": {"curvature"}, "masked-lm": {"curvature"}}


def measure(options: argparse.Namespace) -> None:
    """Score the heads with each method, and measure the curves that do not exist yet."""
    torch.set_num_threads(1)
    options.keep.mkdir(parents=True, exist_ok=True)
    if options.language:
        encoder_in(Path(options.model), options.language, options.steps)
    model, tokenizer = hw.load(options.model), hw.load_tokenizer(options.model)
    material = preparation(options)(model, tokenizer, options)
    draw = partial(
        hw.prune_curves, model, material.evaluate, loss=material.loss, on_progress=progress
    )
    names = [name for name in options.methods if name not in SILENT[material.kind]]
    scores = {name: scores_of(model, material, name, options.keep) for name in names}
    orders = {name: [method.order()] for name, method in scores.items()}
    save_curves(
        options.keep / f"{PLAIN}.npz",
        partial(draw, orders, reference=material.score, points=options.points),
    )
    if options.elsewhere:
        save_curves(
            options.keep / f"half-gate{ELSEWHERE}.npz",
            partial(curves_elsewhere, draw, material, options),
        )
    for name in options.redrawn if options.redraw else ():
        if name in scores and scores[name].over == "texts":
            order = {f"{name}{REDRAWN}": scores[name].redrawn_orders(options.redraw)}
            save_curves(
                options.keep / f"{name}{REDRAWN}.npz",
                partial(draw, order, reference=material.score, points=options.redrawn_points),
            )
    if options.recover:
        recovered = {"steps": options.recover, "rate": options.rate}
        cut = recovering(model, material.recover_on, reference=material.score, **recovered)
        orders[RANDOM] = random_orders(scores[names[0]].heads)
        for name in [order for order in options.recovered if order in orders]:
            points = options.recovered_random if name == RANDOM else options.recovered_points
            order = {f"{name}{RECOVERED}": orders[name]}
            save_curves(
                options.keep / f"{name}{RECOVERED}.npz",
                partial(draw, order, cut=cut, points=points),
            )


def curves_elsewhere(
    draw: Callable[..., Curves], material: Material, options: argparse.Namespace
) -> Curves:
    """The curve of the order that half-gate gave on the texts of another folder."""
    name = f"half-gate{ELSEWHERE}"
    order = hw.Scores.load(options.elsewhere / "half-gate.parquet").order()
    # A name with two orders keeps random ones from being added; the two are the same.
    curves = draw({name: [order] * 2}, reference=material.score, points=options.redrawn_points)
    scores = {name: of[:1] for name, of in curves.scores.items()}
    return replace(curves, per_text={name: curves.per_text[name][:1]}, scores=scores)


def scores_of(model: nn.Module, material: Material, name: str, folder: Path) -> hw.Scores:
    path = folder / f"{name}.parquet"
    if not path.exists():
        method, rounds = METHODS[name]
        scores = hw.importance(model, material.score, method, loss=material.kind, rounds=rounds)
        scores.save(path)
    scores = hw.Scores.load(path)
    print(f"{name}: first to be removed: {', '.join(map(str, scores.order()[:5]))}", flush=True)
    return scores


def progress(done: int, total: int) -> None:
    print(f"{done}/{total}", flush=True)


def save_curves(path: Path, make: Callable[[], Curves]) -> None:
    """Save curves as plain arrays, unless the file exists."""
    if path.exists():
        return
    print(path.stem, flush=True)
    fields = asdict(make())
    with write_beside(path) as beside:
        for name in ("per_text", "scores"):
            fields |= {f"{name}/{order}": values for order, values in fields.pop(name).items()}
        np.savez(beside, **fields)


def publish(options: argparse.Namespace) -> None:
    """Write the tables and the pictures of each folder, as far as its curves exist."""
    for folder in options.keep:
        model = ModelCurves(folder)
        for end, curves in zip(("", "-recovered"), model.pictures(), strict=False):
            first, *others = curves
            picture = first.plot(*others, allowed=model.allowed)
            save_figure(picture, options.into.parent / f"pruning-{folder.name}{end}.svg")
        insert("\n\n".join(model.sections()), options.into, folder.name)
    if options.compare:
        scores = {folder.name: hw.Scores.load(folder / "half-gate.parquet")
                  for folder in options.compare}  # fmt: skip
        insert("\n\n".join(agreement(scores, "half-gate")), options.into, "agreement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(required=True)
    measuring = parts.add_parser("measure")
    measuring.set_defaults(run=measure)
    measuring.add_argument("model")
    measuring.add_argument("--pairs", type=Path)
    measuring.add_argument("--trees", type=Path, help="CoNLL-U")
    measuring.add_argument("--coref", type=Path, help="a GAP table")
    measuring.add_argument("--text", type=Path)
    measuring.add_argument("--grammar", action="store_true", help="the model is a Mini-GPT")
    measuring.add_argument(
        "--language", help="a generated language; the model is an encoder trained on it"
    )
    measuring.add_argument("--steps", type=int, default=1600, help="that the encoder is trained")
    measuring.add_argument(
        "--redraw", type=int, default=0, help="orders from other draws of the scored texts"
    )
    measuring.add_argument(
        "--keep", type=Path, required=True, help="a folder for scores and curves"
    )
    measuring.add_argument("--texts", type=int, default=64, help="texts that heads are scored on")
    measuring.add_argument(
        "--own", type=int, default=96, help="generated texts that models recover on"
    )
    measuring.add_argument(
        "--judging", type=int, default=150, help="pairs or texts that curves are measured on"
    )
    measuring.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    measuring.add_argument(
        "--points", type=int, nargs="+", help="numbers of removed heads to measure"
    )
    measuring.add_argument(
        "--recover", type=int, default=0, help="training steps; 0 for no recovery"
    )
    measuring.add_argument(
        "--elsewhere", type=Path, help="a folder of other texts, whose half-gate scores are tried"
    )
    measuring.add_argument("--redrawn", nargs="+", default=["half-gate", "ablation"])
    measuring.add_argument("--redrawn-points", type=int, nargs="+")
    measuring.add_argument("--rate", type=float, default=1e-4)
    few = [name for name in METHODS if name not in ("half-gate, 9 rounds", "zero-ablation")]
    measuring.add_argument("--recovered", nargs="+", default=[*few, RANDOM])
    measuring.add_argument("--recovered-points", type=int, nargs="+")
    measuring.add_argument("--recovered-random", type=int, nargs="+")
    publishing = parts.add_parser("publish")
    publishing.set_defaults(run=publish)
    publishing.add_argument("keep", type=Path, nargs="+", help="folders of scores and curves")
    publishing.add_argument("--into", type=Path, required=True, help="the page")
    publishing.add_argument(
        "--compare", type=Path, nargs="+", help="folders whose orders are compared"
    )
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
