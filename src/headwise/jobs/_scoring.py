"""The importance of every head on the texts of a shard: scores of single texts, side by side."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwise.corpora import AnnotatedText
from headwise.corpora.streams import windows
from headwise.errors import ArgumentError, HeadError
from headwise.jobs._measurement import Opened, WithoutSurvey, code_of
from headwise.models import iter_pieces
from headwise.scoring import Loss, importance
from headwise.tables import Scores

# Methods that score each text by itself. Mean ablation, gates and further rounds need all texts.
_METHODS = ("half-gate", "gradient", "curvature", "zero-ablation")


@dataclass(frozen=True)
class ImportanceRequest:
    """A corpus job that scores heads, in place of computing statistics.

    Attributes:
        method: A method of `importance` that scores each text by itself: half-gate, gradient,
            curvature or zero-ablation.
        loss: The loss, as `importance` takes it; None is that of the model's class.
    Raises:
        ArgumentError: the method is another one.
    """

    method: str = "half-gate"
    loss: Loss | str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ArgumentError(
                f"ImportanceRequest: method={self.method!r} needs all texts, and a shard has only "
                f"its own. Choose from {', '.join(_METHODS)}."
            )


class Importance(WithoutSurvey):
    """Scores of each text; merging concatenates those of the shards."""

    def __init__(self, request: ImportanceRequest) -> None:
        self._request = request

    def describe(self) -> dict[str, Any]:
        """The method and the loss."""
        loss = self._request.loss
        function = loss.of if isinstance(loss, Loss) else loss
        return {
            "kind": "importance",
            "method": self._request.method,
            "loss": code_of(function) if callable(function) else function or "",
        }

    def measure(self, opened: Opened, texts: Iterable[AnnotatedText], shard: int) -> Scores | None:
        """The scores of some texts, a few hundred at a time.

        Raises:
            UnsupportedError: the heads of the model cannot be gated exactly.
        """
        parts = [
            importance(
                opened.model,
                window,
                self._request.method,
                loss=self._request.loss,
                tokenizer=opened.tokenizer,
                max_tokens=opened.max_tokens,
            )
            for window in _strings(texts)
            if any(iter_pieces(opened.tokenizer, [(text, None) for text in window], opened.model))
        ]
        return _joined(parts) if parts else None

    def load(self, path: Path) -> Scores:
        """The scores of a shard."""
        return Scores.load(path)

    def merge(self, results: Iterable[Scores], survey: None, model: str) -> Scores:
        """The scores of all texts, in the order of the parts.

        Raises:
            HeadError: the parts have different heads.
        """
        return _joined(results)


def _strings(texts: Iterable[AnnotatedText]) -> Iterator[list[str]]:
    return ([text.text for text in window] for window in windows(texts))


def _joined(results: Iterable[Scores]) -> Scores:
    first, *others = parts = list(results)
    for part in others:
        if part.heads != first.heads:
            raise HeadError(
                f"corpus: shards have {len(first.heads)} and {len(part.heads)} heads. Run "
                f"them with one model."
            )
    return replace(first, per_text=np.concatenate([part.per_text for part in parts]))
