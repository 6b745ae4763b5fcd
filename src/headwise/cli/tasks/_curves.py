"""Pruning curves: the loss as heads are removed in some order, and the elbow of each order."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from headwise._display import counted
from headwise.cli._options import Shared
from headwise.cli._print import progress_bar
from headwise.cli.tasks._texts import Texts, sentences_of
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError
from headwise.files import write_beside
from headwise.recovery import recovering
from headwise.scoring import Inputs, Loss, paired, prune_curves, read_batches
from headwise.tables import Curves, Head, Scores, save_figure

# Points of a recovered curve; each one trains a smaller model.
_RECOVERED_POINTS = 9
# A half of two texts has an interval.
_FEWEST_TEXTS = 4


@dataclass(frozen=True)
class CurveInputs:
    """The inputs of curves, in two halves.

    Attributes:
        reference: The half for mean outputs and for recovery.
        evaluation: The half that the loss is measured on.
        loss: The loss to measure.
    """

    reference: list[Inputs]
    evaluation: list[Inputs]
    loss: Loss | str | None


def check_texts_suffice(texts: Texts, option: str) -> None:
    """Refuse texts that are too few to be split into two halves.

    Raises:
        ArgumentError: there are fewer than four.
    """
    if len(texts) < _FEWEST_TEXTS:
        raise ArgumentError(
            f"{option} with {counted(len(texts), 'text or pair', 'texts or pairs')}; half of "
            f"them are for reference, half for evaluation. Use at least {_FEWEST_TEXTS}."
        )


def curve_inputs(
    texts: Texts, loss: str, model: nn.Module, tokenizer: Any, shared: Shared
) -> CurveInputs:
    """Every second text or pair is for reference; the others are for evaluation.

    Raises:
        ArgumentError: there are too few, or pairs are combined with another loss.
    """
    check_texts_suffice(texts, "prune: --curve")
    pairs = [pair for pair in texts if isinstance(pair, SentencePair)]
    if pairs and loss != "embedding":
        raise ArgumentError(
            f"prune: --pairs with scores of the loss {loss!r}. Score the heads with headwise "
            f"importance --loss embedding, or use --text."
        )
    if pairs:
        evaluation, pair_loss = paired(pairs[1::2], model, tokenizer, shared.max_tokens)
        reference = read_batches(sentences_of(pairs[::2]), model, tokenizer, shared.max_tokens)
        return CurveInputs(reference, evaluation, pair_loss)
    sentences = sentences_of(texts)
    reference, evaluation = (
        read_batches(sentences[start::2], model, tokenizer, shared.max_tokens) for start in (0, 1)
    )
    return CurveInputs(reference, evaluation, loss or None)


def removal_orders(by: Scores, beside: Sequence[Scores]) -> dict[str, list[Head]]:
    """The order in which each method removes heads, by the method's name; that of `by` first.

    Raises:
        ArgumentError: scores are of another model, or two are by the same method.
    """
    orders: dict[str, list[Head]] = {}
    for scores in (by, *beside):
        if scores.model != by.model:
            raise ArgumentError(
                f"prune: --beside has scores of the model {scores.model}, --by scores of "
                f"{by.model}. Score the heads of one model."
            )
        rounds = 1 + int(scores.round.max())
        name = scores.method if rounds == 1 else f"{scores.method}, {rounds} rounds"
        if name in orders:
            raise ArgumentError(
                f"prune: --by and --beside have two orders by {name}. Use one order per method."
            )
        orders[name] = scores.order()
    return orders


def curves_of(
    model: nn.Module,
    orders: Mapping[str, list[Head]],
    inputs: CurveInputs,
    recovery: Mapping[str, Any],
) -> list[Curves]:
    """The curves of these orders and of random ones; of the first also after recovery."""
    with progress_bar("Drawing curves") as on_progress:
        curves = [
            prune_curves(
                model, inputs.evaluation, {name: [order] for name, order in orders.items()},
                reference=inputs.reference, loss=inputs.loss, on_progress=on_progress,
            )
        ]  # fmt: skip
    if recovery["steps"]:
        name, order = next(iter(orders.items()))
        cut = recovering(model, inputs.reference, **recovery)
        stride = max(1, len(order) // _RECOVERED_POINTS)
        with progress_bar(f"Recovering {_RECOVERED_POINTS} smaller models") as on_progress:
            curves += [
                prune_curves(
                    model, inputs.evaluation, {f"{name}, recovered": [order]},
                    loss=inputs.loss, points=range(0, len(order), stride), cut=cut,
                    on_progress=on_progress,
                )
            ]  # fmt: skip
    return curves


def write_curves(all_curves: list[Curves], folder: Path) -> list[dict[str, Any]]:
    """Write the table and the picture of curves; return the elbow of each order."""
    allowed = all_curves[0].allowance()
    frame = pd.concat([curves.frame(allowed) for curves in all_curves], ignore_index=True)
    with write_beside(folder / "curves.csv") as beside:
        frame.to_csv(beside, index=False)
    first, *others = all_curves
    save_figure(first.plot(*others, allowed=allowed), folder / "curves.svg")
    return [
        {"order": name, "allowed": allowed, **asdict(curves.elbow(name, allowed))}
        for curves in all_curves
        for name in curves.per_text
    ]
