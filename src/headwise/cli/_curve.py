"""The curves of `headwise prune`: what is lost as heads go, and where it becomes too much."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from headwise._display import counted
from headwise.cli._options import Shared
from headwise.cli._print import progress
from headwise.cli._progress import Texts, sentences_of
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError
from headwise.recovery import recovering
from headwise.scoring import Inputs, Loss, paired, prune_curves, read_batches
from headwise.tables import Curves, Head, Scores, draw_curves

# Points of a recovered curve, each of which is a training of its own.
_POINTS = 9


@dataclass(frozen=True)
class Material:
    """What is read: some of it to take means over and to recover by, the rest to judge by."""

    learn: list[Inputs]
    judge: list[Inputs]
    loss: Loss | str | None


def material_of(given: Texts, loss: str, model: nn.Module, tokenizer: Any, how: Shared) -> Material:
    """Every second text, or pair with its score, to learn from; the others to judge by.

    Raises:
        ArgumentError: there are too few, or pairs do not go with the loss.
    """
    if len(given) < 4:
        raise ArgumentError(
            f"prune: --curve with {counted(len(given), 'text or pair', 'texts or pairs')}; every "
            f"second one is learned from, the others judge. Give at least 4."
        )
    pairs = [one for one in given if isinstance(one, SentencePair)]
    if pairs and loss != "embedding":
        raise ArgumentError(
            f"prune: --pairs with scores of the loss {loss!r}. Weigh heads by --loss embedding, "
            f"or give --text."
        )
    if pairs:
        judge, judged = paired(pairs[1::2], model, tokenizer, how.max_tokens)
        learn = read_batches(sentences_of(pairs[::2]), model, tokenizer, how.max_tokens)
        return Material(learn, judge, judged)
    texts = sentences_of(given)
    learn, judge = (
        read_batches(texts[start::2], model, tokenizer, how.max_tokens) for start in (0, 1)
    )
    return Material(learn, judge, loss or None)


def orders_of(chosen: Scores, beside: Sequence[Scores]) -> dict[str, list[Head]]:
    """By its method each order of heads, that by which they go first.

    Raises:
        ArgumentError: scores are of another model, or two of the same method.
    """
    orders: dict[str, list[Head]] = {}
    for scores in (chosen, *beside):
        if scores.model != chosen.model:
            raise ArgumentError(
                f"prune: --beside has scores of the model {scores.model}, and --by of "
                f"{chosen.model}. Score the heads of one model."
            )
        rounds = 1 + int(scores.round.max())
        name = scores.method if rounds == 1 else f"{scores.method}, {rounds} rounds"
        if name in orders:
            raise ArgumentError(
                f"prune: --by and --beside have two orders by {name}. Give one of each method."
            )
        orders[name] = scores.order()
    return orders


def curves_of(
    model: nn.Module,
    orders: Mapping[str, list[Head]],
    material: Material,
    recovery: Mapping[str, Any],
) -> list[Curves]:
    """What goes in these orders loses beside random ones, by the first after recovery if asked."""
    with progress("Drawing curves") as tell:
        drawn = [
            prune_curves(
                model, material.judge, {name: [order] for name, order in orders.items()},
                reference=material.learn, loss=material.loss, on_progress=tell,
            )
        ]  # fmt: skip
    if recovery["steps"]:
        name, order = next(iter(orders.items()))
        cut = recovering(model, material.learn, **recovery)
        every = max(1, len(order) // _POINTS)
        with progress(f"Recovering {_POINTS} smaller models") as tell:
            drawn += [
                prune_curves(
                    model, material.judge, {f"{name}, recovered": [order]},
                    loss=material.loss, points=range(0, len(order), every), cut=cut,
                    on_progress=tell,
                )
            ]  # fmt: skip
    return drawn


def write_curves(curves: list[Curves], folder: Path) -> list[dict[str, Any]]:
    """Write the table and the picture, and tell the elbow of each order."""
    allowed = curves[0].allowance()
    frame = pd.concat([one.frame(allowed) for one in curves], ignore_index=True)
    frame.to_csv(folder / "curves.csv", index=False)
    title = "What is lost as heads go"
    (folder / "curves.svg").write_text(draw_curves(*curves, title=title, allowed=allowed), "utf-8")
    return [
        {"order": name, "allowed": allowed, **asdict(one.elbow(name, allowed))}
        for one in curves
        for name in one.per_text
    ]
