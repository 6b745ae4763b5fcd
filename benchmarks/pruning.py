"""What a model loses as its heads go, by each order of importance and by random ones.

    python benchmarks/pruning.py MODEL --pairs stsb-en-dev.csv -o curves.csv
    python benchmarks/pruning.py MODEL --text stories.txt -o curves.csv

Of sentence pairs (two sentences and their similarity in a row, no header) the embeddings are to
be kept, and Spearman's correlation with the similarities is told too. Of texts, parted by
`<|endoftext|>`, the loss of the language model is; every second one judges. With `--own N` all of
them judge, and heads are scored and models recovered on N texts more that the full model writes
itself. With `--recover` the smaller models by half-gate are trained towards the full one for so
many steps, at points of their own. A picture is drawn beside the table.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import headwise as hw
from headwise.chart import draw_curves
from headwise.corpora import read_pairs
from headwise.gauge import Gates, Loss, paired, read_given
from headwise.models import batches, encode
from headwise.recovery import recovering

# By each method, how often it scores.
METHODS = {
    "half-gate": ("half-gate", 1),
    "half-gate, 9 rounds": ("half-gate", 9),
    "gradient": ("gradient", 1),
    "curvature": ("curvature", 1),
    "ablation": ("ablation", 1),
    "zero-ablation": ("zero-ablation", 1),
    "gates": (Gates(), 1),
}
WHERE = {"embedding": {"gradient"}, "lm": {"curvature"}}  # these say nothing there
FIRST = "half-gate"


@dataclass(frozen=True)
class Material:
    """Batches to score heads and take means on, to recover by, and to judge by."""

    score: list[Any]
    learn: list[Any]
    judge: list[Any]
    loss: Loss | str


def of_pairs(model: nn.Module, tokenizer: Any, how: argparse.Namespace) -> Material:
    pairs = read_pairs(how.pairs)
    chosen = np.random.default_rng(0).permutation(len(pairs))
    judging = [pairs[at] for at in chosen[: how.judging]]
    seen = {sentence for pair in judging for sentence in (pair.one, pair.two)}
    others = (pairs[at] for at in chosen[how.judging :])
    fresh = sorted({s for pair in others for s in (pair.one, pair.two)} - seen)
    fresh = [fresh[at] for at in np.random.default_rng(1).permutation(len(fresh))]
    read = partial(read_given, model=model, tokenizer=tokenizer)
    judge, loss = paired(judging, model, tokenizer)
    return Material(read(fresh[: how.texts]), read(fresh[how.texts :]), judge, loss)


def of_text(model: nn.Module, tokenizer: Any, how: argparse.Namespace) -> Material:
    stories = [story.strip() for story in how.text.read_text("utf-8").split("<|endoftext|>")]

    def read(some: list[str]) -> list[Any]:
        pieces = [ids for ids in encode(tokenizer, some, model, how.tokens) if len(ids) > 3]
        return [vars(batch) for batch in batches(pieces, 16)]

    if not how.own:
        return Material(read(stories[::2]), read(stories[::2]), read(stories[1::2]), "lm")
    judge = read(stories)
    own = written_by(model, int(judge[0]["input_ids"][0, 0]), how.texts + how.own)
    score, learn = ([{"input_ids": ids} for ids in part.split(8)]
                    for part in own.split([how.texts, how.own]))  # fmt: skip
    return Material(score, learn, judge, "lm")


def written_by(model: nn.Module, first: int, texts: int) -> torch.Tensor:
    """Texts of the model's own, each as long as it reads, drawn from its predictions."""
    torch.manual_seed(0)
    start = torch.full((texts, 1), first)
    length = model.config.max_position_embeddings - 1
    how = {"min_new_tokens": length, "max_new_tokens": length, "top_k": 0, "do_sample": True}
    return model.generate(start, attention_mask=torch.ones_like(start), **how)


def orders_of(model: nn.Module, given: list[Any], loss: str, names: list[str]) -> dict[str, Any]:
    """The orders of going, by name."""
    orders = {}
    for name in names:
        method, rounds = METHODS[name]
        if name not in WHERE[loss]:
            scores = hw.importance(model, given, method, loss=loss, rounds=rounds)
            orders[name] = [scores.order()]
            print(f"{name}: first to go {', '.join(map(str, scores.order()[:5]))}", flush=True)
    return orders


def tell(done: int, total: int) -> None:
    print(f"{done}/{total}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", "-o", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64, help="texts that heads are scored on")
    parser.add_argument("--own", type=int, default=0, help="own texts that models recover by")
    parser.add_argument("--tokens", type=int, help="the most tokens of a text")
    parser.add_argument("--judging", type=int, default=150, help="pairs that curves are of")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--points", type=int, nargs="+", help="after how many heads to look")
    parser.add_argument("--recover", type=int, default=0, help="steps; none without")
    parser.add_argument("--rate", type=float, default=1e-4)
    how = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = hw.load(how.model), hw.load_tokenizer(how.model)
    material = (of_pairs if how.pairs else of_text)(model, tokenizer, how)
    kind = "embedding" if how.pairs else "lm"
    judged = partial(
        hw.prune_curves, model, material.judge, loss=material.loss, points=how.points, on_step=tell
    )
    if how.recover:
        names, [order] = [FIRST], orders_of(model, material.score, kind, [FIRST])[FIRST]
        cut = recovering(
            model, material.learn, reference=material.score, steps=how.recover, rate=how.rate
        )
        curves = judged({f"{FIRST}, recovered": [order]}, cut=cut)
    else:
        names = how.methods
        orders = orders_of(model, material.score, kind, names)
        curves = judged(orders, reference=material.score)
    report(curves, how.out)


def report(curves: hw.Curves, out: Path) -> None:
    allowed = curves.allowance()
    frame: pd.DataFrame = curves.frame(allowed)
    frame.to_csv(out, index=False)
    picture = draw_curves(curves, title="What is lost as heads go", allowed=allowed)
    out.with_suffix(".svg").write_text(picture, "utf-8")
    print(frame.to_string(float_format="{:.4f}".format))
    for order in curves.per_text:
        found = curves.elbow(order, allowed)
        print(f"{order}: {found.heads} ({found.low:g} to {found.high:g}) lose under {allowed:.4g}")


if __name__ == "__main__":
    main()
