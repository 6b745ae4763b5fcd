"""What a model loses as its heads go, by each order of importance and by random ones.

    python benchmarks/pruning.py MODEL --pairs stsb-en-dev.csv -o curves.csv
    python benchmarks/pruning.py MODEL --text stories.txt -o curves.csv

Of sentence pairs (two sentences and their similarity in a row, no header) the embeddings are to
be kept, and Spearman's correlation with the similarities is told too; of texts, parted by
`<|endoftext|>`, the loss of the language model. Heads are scored and their means taken on some
texts, the curves are of others. A picture is drawn beside the table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import headwise as hw
from headwise.chart import draw_curves
from headwise.corpora import read_pairs
from headwise.gauge import Loss, embedding
from headwise.models import batches, encode
from headwise.scores import random_orders

# By each method, how often it scores.
METHODS = {
    "half-gate": ("half-gate", 1),
    "half-gate, 9 rounds": ("half-gate", 9),
    "gradient": ("gradient", 1),
    "curvature": ("curvature", 1),
    "ablation": ("ablation", 1),
    "zero-ablation": ("zero-ablation", 1),
}
WHERE = {"embedding": {"gradient"}, "lm": {"curvature"}}  # these say nothing there


class Remembering:
    """The embedding loss, which also keeps the embeddings that it made."""

    def __init__(self) -> None:
        self.loss = embedding()
        self.made: list[Tensor] = []

    def __call__(self, output: Any, batch: Any) -> Tensor:
        self.made.append(self.loss.of(output, batch))
        return self.made[-1]


def orders_of(model: nn.Module, given: Sequence[Any], loss: str) -> dict[str, list[Any]]:
    """The orders of going, by name."""
    orders, scores = {}, None
    for name, (method, rounds) in METHODS.items():
        if method not in WHERE[loss]:
            scores = hw.importance(model, given, method, loss=loss, rounds=rounds)
            orders[name] = [scores.order()]
            print(f"{name}: first to go {', '.join(map(str, scores.order()[:5]))}", flush=True)
    assert scores is not None
    return orders | {"random": random_orders(scores.heads, 5)}


def study_pairs(model: nn.Module, tokenizer: Any, path: Path, how: argparse.Namespace) -> None:
    read_in = read_pairs(path)
    pairs = [(pair.one, pair.two) for pair in read_in]
    similar = np.array([pair.similarity for pair in read_in])
    chosen = np.random.default_rng(0).permutation(len(pairs))
    held_out, other = chosen[: how.pairs_used], chosen[how.pairs_used :]
    seen = {sentence for at in held_out for sentence in pairs[at]}
    fresh = sorted({s for at in other for s in pairs[at]} - seen)
    fresh = [fresh[at] for at in np.random.default_rng(1).permutation(len(fresh))[: how.texts]]
    reference = given_of(model, tokenizer, fresh)
    # Both sentences of a pair in their places: batches of equal length would mix them.
    sentences = [pairs[at][side] for side in (0, 1) for at in held_out]
    ordered = sorted(range(len(sentences)), key=lambda at: len(sentences[at]))
    read = [
        dict(tokenizer([sentences[at] for at in part], padding=True, return_tensors="pt"))
        for part in (ordered[start : start + 32] for start in range(0, len(ordered), 32))
    ]
    orders = orders_of(model, reference, "embedding")
    remembering = Remembering()
    curves = hw.prune_curves(
        model, read, orders, reference=reference, points=how.points,
        loss=Loss("embedding", remembering, compares=True), on_step=tell,
    )  # fmt: skip
    frame = curves.frame()
    # The first embeddings are of the full model; then come all points of one order after another.
    made = torch.cat(remembering.made).view(-1, len(sentences), remembering.made[0].shape[-1])
    back = np.argsort(ordered)
    rhos = [_spearman(one.numpy()[back], similar[held_out]) for one in made[1:]]
    per_order = np.array(rhos).reshape(-1, len(curves.removed))
    counts = [len(values) for values in curves.per_text.values()]
    grouped = np.split(per_order, np.cumsum(counts)[:-1])
    frame["spearman"] = np.concatenate([group.mean(0) for group in grouped])
    frame["spearman.low"] = np.concatenate([group.min(0) for group in grouped])
    frame["spearman.high"] = np.concatenate([group.max(0) for group in grouped])
    tell_all(curves, frame, how)


def _spearman(embeddings: np.ndarray, similar: np.ndarray) -> float:
    one, two = np.split(embeddings, 2)
    return float(spearmanr((one * two).sum(1), similar).statistic)


def study_text(model: nn.Module, tokenizer: Any, path: Path, how: argparse.Namespace) -> None:
    texts = [text.strip() for text in path.read_text("utf-8").split("<|endoftext|>")]
    reference = given_of(model, tokenizer, texts[::2], how.tokens)
    read = given_of(model, tokenizer, texts[1::2], how.tokens)
    orders = orders_of(model, reference, "lm")
    curves = hw.prune_curves(
        model, read, orders, reference=reference, points=how.points, loss="lm", on_step=tell
    )
    tell_all(curves, curves.frame(), how)


def given_of(model: nn.Module, tokenizer: Any, texts: list[str], tokens: int | None = None) -> Any:
    pieces = [ids for ids in encode(tokenizer, texts, model, tokens) if len(ids) > 3]
    return [vars(batch) for batch in batches(pieces, 32)]


def tell(done: int, total: int) -> None:
    print(f"{done}/{total}", flush=True)


def tell_all(curves: hw.Curves, frame: pd.DataFrame, how: argparse.Namespace) -> None:
    frame.to_csv(how.out, index=False)
    how.out.with_suffix(".svg").write_text(draw_curves(curves, "What is lost as heads go"), "utf-8")
    print(frame.to_string(float_format="{:.4f}".format))
    for order in curves.per_text:
        allowed = how.allowed or 0.01 * float(curves.mean(order)[0, 0])
        print(f"{order}: {curves.removable(order, allowed)} heads lose less than {allowed:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", "-o", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=64, help="texts that heads are scored on")
    parser.add_argument("--tokens", type=int, help="the most tokens of a text")
    parser.add_argument("--pairs-used", type=int, default=200, help="pairs that curves are of")
    parser.add_argument("--points", type=int, nargs="+", help="after how many heads to look")
    parser.add_argument("--allowed", type=float, help="loss allowed; else 1 %% of the full one")
    how = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = hw.load(how.model), hw.load_tokenizer(how.model)
    if how.pairs:
        study_pairs(model, tokenizer, how.pairs, how)
    else:
        study_text(model, tokenizer, how.text, how)


if __name__ == "__main__":
    main()
