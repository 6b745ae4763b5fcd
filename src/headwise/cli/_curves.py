"""The loss of a model as heads are removed: what `prune`, `group` and `report` share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise._display import counted
from headwise.cli._inputs import Texts, sentences_of
from headwise.corpora import SentencePair
from headwise.errors import ArgumentError
from headwise.scoring import Inputs, Loss, paired, prune_curves, read_batches
from headwise.tables import Head

# A half of two texts has an interval.
_FEWEST_TEXTS = 4
# What a loss counts, by its name.
UNITS = {
    "lm": "nats per predicted token, mean over texts",
    "masked-lm": "nats per masked token, mean over texts",
    "label": "loss of the labels",
    "embedding": "1 − cosine to the embedding of the full model",
}


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
        cls, texts: Texts, loss: str, model: nn.Module, tokenizer: Any, max_tokens: int | None
    ) -> "QualityInputs":
        """The texts or pairs under the loss of the scores."""
        pairs = [pair for pair in texts if isinstance(pair, SentencePair)]
        if pairs and loss == "embedding":
            return cls(*paired(pairs, model, tokenizer, max_tokens))
        sentences = sentences_of(texts)
        return cls(read_batches(sentences, model, tokenizer, max_tokens), loss or None)

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
        quality = {UNITS.get(curves.loss, curves.loss): curves.per_text["removed"][0].mean(-1)}
        if curves.scores:
            quality[curves.score] = curves.scores["removed"][0]
        return {name: (float(x[0]), float(x[-1])) for name, x in quality.items()}
