"""The loss of a model as heads are removed: what `prune`, `group` and `report` share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from headwise._display import counted
from headwise.cli._inputs import Texts, sentences_of
from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError
from headwise.recovery import recovering
from headwise.scoring import Inputs, Loss, in_fifths, paired, prune_curves, read_batches
from headwise.surgery import removal_order
from headwise.tables import Curves, Head, Scores

# Points of a recovered curve; each one trains a smaller model.
_RECOVERED_POINTS = 9
# Times the square root of the number of pairs: by how much Spearman's correlation differs between
# draws of the pairs (0.02 at 100 pairs; docs/pruning.md).
_NOISE_OF_SPEARMAN = 0.2
# A half of two texts has an interval.
_FEWEST_TEXTS = 4
# What a loss counts, by its name.
_UNITS = {
    "lm": "nats per predicted token, mean over texts",
    "masked-lm": "nats per masked token, mean over texts",
    "label": "loss of the labels",
    "embedding": "1 − cosine to the embedding of the full model",
}
# `--remove auto` allows the loss to grow by this share of the full model's, or of 1 if the loss
# compares with the full model.
AUTO_SHARE = 0.01


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


@dataclass(frozen=True)
class QualityInputs:
    """The given texts as batches, and the loss that quality is measured by."""

    batches: list[Inputs]
    loss: Loss | str | None

    @classmethod
    def of(
        cls, texts: Texts, loss: str, model: nn.Module, tokenizer: Any, shared: Shared
    ) -> "QualityInputs":
        """The texts or pairs under the loss of the scores."""
        pairs = [pair for pair in texts if isinstance(pair, SentencePair)]
        if pairs and loss == "embedding":
            return cls(*paired(pairs, model, tokenizer, shared.max_tokens))
        sentences = sentences_of(texts)
        return cls(read_batches(sentences, model, tokenizer, shared.max_tokens), loss or None)

    def compare(
        self, full: nn.Module, small: nn.Module, removed: Sequence[Head], heads: Sequence[Head]
    ) -> dict[str, tuple[float, float]]:
        """The mean loss of the full and of the smaller model, by its unit, and the task's score.

        Args:
            removed: At least one head, for the point of the curve where the smaller model stands.
        """
        # The heads that stay come last: a curve leaves out the last head of each layer.
        order = [*removed, *(head for head in heads if head not in removed)]
        curves = prune_curves(
            full, self.batches, {"removed": [order]}, loss=self.loss,
            points=[len(removed)], cut=lambda cut: small if cut else full,
        )  # fmt: skip
        quality = {_UNITS.get(curves.loss, curves.loss): curves.per_text["removed"][0].mean(-1)}
        if curves.scores:
            quality[curves.score] = curves.scores["removed"][0]
        return {name: (float(x[0]), float(x[-1])) for name, x in quality.items()}

    def removable_share(
        self, full: nn.Module, scores: Scores, quality: float, by_score: bool, uniform: bool
    ) -> float:
        """The share of heads at the elbow of the plans' curve; a note states the bar.

        Args:
            quality: What may be lost: a share of the full model's loss, or of 1 if the loss
                compares with the full model.
            by_score: Whether the task's score may fall by so much, whatever the loss does.
            uniform: Whether plans remove the same number of heads from each layer.
        Raises:
            ArgumentError: not even one head can be removed under the bar.
        """
        order, ends = removal_order(scores, uniform=uniform)
        points = in_fifths(ends)
        print_note(
            f"auto: the loss is measured at {counted(1 + len(points), 'number')} of heads, each in "
            f"{counted(len(self.batches), 'pass', 'passes')} over half of the texts"
        )
        with progress_bar("Finding how many heads can be removed") as on_progress:
            curves = prune_curves(
                full, self.batches, {"order": order}, reference=self.batches,
                loss=self.loss, points=points, random=0, on_progress=on_progress,
            )  # fmt: skip
        unit, change = _UNITS.get(curves.loss, curves.loss), "the loss grows"
        if by_score:  # a curve like any other: what the score lacks grows
            pairs = curves.per_text["order"].shape[-1] // 2  # a loss for each of their sentences
            unit, change = f"on {pairs} pairs", f"{curves.score} falls"
            noise = _NOISE_OF_SPEARMAN / pairs**0.5
            if quality < noise:
                print_note(
                    f"auto: {unit}, a change of {curves.score} below {noise:.1g} can be noise"
                )
            lost = -curves.scores["order"][..., None]
            curves = replace(curves, per_text={"order": lost}, compares=True)
        allowed = curves.allowance(quality)
        elbow = curves.elbow("order", allowed)
        bar = f"{allowed:.4g} ({unit})"
        if elbow.heads == 0:
            first = "head" if ends[:1] == [1] else counted(next(iter(ends), 0), "head")
            raise ArgumentError(
                f"prune: --remove auto: without the first {first} {change} by more than {bar}. "
                f"Give a larger --quality, a share, such as --remove 0.1, or score the heads on "
                f"more texts."
            )
        of_what = "" if curves.compares else f", {quality:.2g} of the full model's"
        print_note(
            f"auto: {elbow} of {len(scores.heads)} heads can be removed before {change} by "
            f"{bar}{of_what}"
        )
        return share_at_elbow(curves, quality)


def share_at_elbow(curves: Curves, quality: float = AUTO_SHARE) -> float:
    """The share of heads that the first order can lose at this price; 0 for none."""
    heads = curves.elbow(next(iter(curves.per_text)), curves.allowance(quality)).heads
    return float(np.nextafter(heads / curves.n_heads, 1)) if heads else 0.0


def curves_of(
    model: nn.Module,
    orders: Mapping[str, list[Head]],
    ends: list[int],
    reference: list[Inputs],
    evaluation: QualityInputs,
    recovery: Mapping[str, Any],
) -> list[Curves]:
    """The curves of these orders and of random ones; of the first also after recovery.

    Args:
        ends: The numbers of heads after which a plan by the first order can end.
        reference: What mean outputs and recovery are computed on; the loss is of the evaluation.
    """
    with progress_bar("Drawing curves") as on_progress:
        curves = [
            prune_curves(
                model, evaluation.batches, {name: [order] for name, order in orders.items()},
                reference=reference, loss=evaluation.loss, points=in_fifths(ends),
                on_progress=on_progress,
            )
        ]  # fmt: skip
    if recovery["steps"]:
        name, order = next(iter(orders.items()))
        stride = max(1, (len(ends) + 1) // _RECOVERED_POINTS)
        with progress_bar(f"Recovering {_RECOVERED_POINTS} smaller models") as on_progress:
            curves += [
                prune_curves(
                    model, evaluation.batches, {f"{name}, recovered": [order]},
                    loss=evaluation.loss, points=[0, *ends][::stride],
                    cut=recovering(model, reference, **recovery), on_progress=on_progress,
                )
            ]  # fmt: skip
    return curves
