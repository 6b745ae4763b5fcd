"""Scores: the importance of every head, with an interval over texts, without model or torch.

The values of each text are kept, so that intervals resample texts: tokens of one text are not
independent of each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from headwise._display import counted
from headwise.errors import ArgumentError, ShapeError
from headwise.tables._bootstrap import bootstrap_means, mean_interval
from headwise.tables._figures import at_prompt, notebook_html, plot_heads, plot_ranking
from headwise.tables._heads import Head, HeadLike, address_columns, resolve_heads
from headwise.tables._table_file import (
    TableFile,
    heads_of_rows,
    indices_of,
    numbers_of,
    originals_of_rows,
)

__all__ = ["Scores", "random_orders", "removable"]

_TEXT = "text."


def random_orders(heads: Iterable[Head], n: int = 5, seed: int = 0) -> list[list[Head]]:
    """Random orders of heads, the baseline for every order by importance.

    Raises:
        ArgumentError: `n` is below 1.
    """
    if n < 1:
        raise ArgumentError(f"random_orders: n={n}. Give at least 1.")
    known = sorted(heads)
    rng = np.random.default_rng(seed)
    return [[known[index] for index in rng.permutation(len(known))] for _ in range(n)]


def removable(order: Sequence[Head]) -> list[Head]:
    """The heads that may be removed, in the same order: the last head of each layer stays."""
    last = {(head.stack, head.layer): head for head in order}
    return [head for head in order if last[head.stack, head.layer] != head]


@dataclass(frozen=True, eq=False)
class Scores(TableFile):
    """The importance of every head by one method and one loss.

    Attributes:
        heads: The address of each row.
        kv_heads: The key/value head that each head reads.
        per_text: The importance of each head in each text, or for each seed.
        rounds: The round of scoring after which each head was removed, from 0. A head's
            importance is that of its round, measured with the heads of earlier rounds removed.
            None if heads were scored once.
        method: The method that measured importance.
        loss: The loss that importance is measured by.
        over: What a row of `per_text` is, and so what intervals resample: "texts" or "seeds".
        model: The fingerprint of the model's weights.
        versions: The versions of the software that made the scores.
        original: In a pruned or grouped model, each head's address in the original model, None
            for a head of zeros. Empty if it is not known.
        skipped: The number of texts that the model refused (see `BatchImportance`).
    Raises:
        ShapeError: a column does not have one row per head, or there is no text.

    Example:
        >>> heads = (Head("", 0, 0), Head("", 0, 1))
        >>> values = np.array([[0.5, 0.25], [1.5, 0.25]])
        >>> scores = Scores(heads, np.array([0, 1]), values, method="ablation", loss="lm")
        >>> scores.frame()[["name", "importance", "method"]]
            name  importance    method
        0  L0.H0        1.00  ablation
        1  L0.H1        0.25  ablation
        >>> [str(head) for head in scores.order()]
        ['L0.H1', 'L0.H0']
    """

    _schema = ("headwise_scores", 1)

    heads: tuple[Head, ...]
    kv_heads: Int64[np.ndarray, " N"]
    per_text: Float64[np.ndarray, "M N"]
    rounds: Int64[np.ndarray, " N"] | None = None
    method: str = ""
    loss: str = ""
    over: str = "texts"
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    original: tuple[Head | None, ...] = ()
    skipped: int = 0

    def __post_init__(self) -> None:
        heads, texts = len(self.heads), len(self.per_text)
        rows = sorted({len(self.kv_heads), self.per_text.shape[1], len(self.round)} - {heads})
        if rows or not texts:
            raise ShapeError(
                f"Scores: {heads} heads, columns of {rows or heads} rows and {texts} texts. "
                f"Give a value for each head in at least one text."
            )

    def __add__(self, other: "Scores") -> "Scores":
        """The scores over the texts of both.

        Raises:
            ArgumentError: they are of different models, heads, methods or losses, or of rounds.
        """
        for name in ("model", "heads", "method", "loss", "over"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ArgumentError(
                    f"Scores: {name} {str(mine)[:40]!r} and {str(theirs)[:40]!r} differ. Add "
                    f"scores of the same model, by the same method."
                )
        if self.rounds is not None or other.rounds is not None:
            raise ArgumentError(
                "Scores: scores of several rounds do not add, since each removes heads of its "
                "own. Score all texts at once."
            )
        per_text = np.concatenate([self.per_text, other.per_text])
        return replace(self, per_text=per_text, skipped=self.skipped + other.skipped)

    @cached_property
    def round(self) -> Int64[np.ndarray, " N"]:
        """The round of each head; 0 for all heads if they were scored once."""
        return np.zeros(len(self.heads), np.int64) if self.rounds is None else self.rounds

    @cached_property
    def importance(self) -> Float64[np.ndarray, " N"]:
        """The mean over texts, in units of the loss."""
        return self.per_text.mean(0)

    def interval(self) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
        """The bootstrap interval (95 %) of each head's importance, texts resampled.

        NaN for a single text.
        """
        if len(self.per_text) == 1:
            unknown = np.full(len(self.heads), np.nan)
            return unknown, unknown
        return mean_interval(self.per_text)

    def order(self) -> list[Head]:
        """The heads from the least to the most important: the order of removal."""
        rows = np.lexsort((self.importance, self.round))
        return [self.heads[row] for row in rows]

    def redrawn_orders(self, n: int = 10, seed: int = 0) -> list[list[Head]]:
        """Orders of removal from `n` resamples of the scored texts, drawn with replacement.

        Other texts would give other scores and another order. Curves of several such orders under
        one name have an elbow whose interval covers that variation as well as that of the
        evaluated texts. Rounds stay as they are: an order within a round is drawn, not the heads
        of the round.

        Raises:
            ArgumentError: `n` is below 1, or there is a single text.
        """
        if n < 1 or len(self.per_text) < 2:
            raise ArgumentError(
                f"Scores.redrawn_orders: n={n} of {len(self.per_text)} {self.over}. Give at least "
                f"one order, and score two texts or more."
            )
        drawn = bootstrap_means(self.per_text, n, seed)
        rows = (np.lexsort((importance, self.round)) for importance in drawn)
        return [[self.heads[row] for row in order] for order in rows]

    def per_layer(self) -> "Scores":
        """The scores with those of each layer divided by their ℓ2 norm.

        This removes differences between layers: where some layers matter more than others, the
        order over all layers gets worse. A layer of zeros stays as it is.

        Source: Michel et al. 2019, section 4.1, after Molchanov et al. 2017.
        """
        layers = [(head.stack, head.layer) for head in self.heads]
        squared = dict.fromkeys(layers, 0.0)
        for layer, value in zip(layers, self.importance.tolist(), strict=True):
            squared[layer] += value**2
        norms = np.array([squared[layer] ** 0.5 or 1.0 for layer in layers])
        return replace(self, per_text=self.per_text / norms, method=f"{self.method} per layer")

    def row(self, head: HeadLike) -> int:
        """The row of a head, by any form of its name."""
        return self.heads.index(resolve_heads(head, self.heads)[0])

    def frame(self) -> pd.DataFrame:
        """A tidy frame: name, stack, layer, head, importance with its 95 % interval, method, loss.

        Scores of several rounds have a column `round` too, those of a pruned or grouped model a
        column `original` with each head's name in the original model, if it is known.
        """
        low, high = self.interval()
        columns = address_columns(self.heads)
        columns |= {"importance": self.importance, "ci_low": low, "ci_high": high}
        columns |= {"method": self.method, "loss": self.loss}
        if self.rounds is not None:
            columns["round"] = self.rounds
        if self.original:
            columns["original"] = [str(head or "") for head in self.original]
        return pd.DataFrame(columns)

    def plot(self, *, kind: str = "map", ax: Any = None) -> Any:
        """Draw the importance of every head.

        Args:
            kind: "map" draws a grid of layers and heads; "ranking" draws the heads in their
                order of removal, with 95 % intervals.
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes.
        Raises:
            ArgumentError: `kind` is another, or `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        label = f"importance ({self.method}, {self.loss})"
        if kind == "map":
            return plot_heads("Scores.plot", self.heads, self.importance, label, ax)
        if kind != "ranking":
            raise ArgumentError(f"Scores.plot: kind={kind!r}. Choose 'map' or 'ranking'.")
        rows = [self.row(head) for head in self.order()]
        low, high = (end[rows] for end in self.interval())
        heads = [self.heads[row] for row in rows]
        values = self.importance[rows]
        return plot_ranking("Scores.plot", heads, (values, low, high), label, ax)

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        columns = {"kv_head": self.kv_heads}
        columns |= {f"{_TEXT}{text}": values for text, values in enumerate(self.per_text)}
        frame = pd.concat([self.frame(), pd.DataFrame(columns)], axis=1)
        about = {
            "method": self.method,
            "loss": self.loss,
            "over": self.over,
            "texts": len(self.per_text),
            "skipped": self.skipped,
            "model": self.model,
            "versions": dict(self.versions),
        }
        return frame, about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "Scores":
        texts = [numbers_of(frame, f"{_TEXT}{number}") for number in range(about["texts"])]
        return cls(
            heads=heads_of_rows(frame),
            kv_heads=indices_of(frame, "kv_head"),
            per_text=np.stack(texts),
            rounds=indices_of(frame, "round") if "round" in frame else None,
            method=str(about["method"]),
            loss=str(about["loss"]),
            over=str(about["over"]),
            model=str(about["model"]),
            versions=dict(about["versions"]),
            original=originals_of_rows(frame) if "original" in frame else (),
            skipped=int(about["skipped"]),
        )

    def __str__(self) -> str:
        """The number of heads, the method, the loss and the number of texts."""
        return (
            f"{counted(len(self.heads), 'head')} by {self.method} of the loss {self.loss}, over "
            f"{counted(len(self.per_text), self.over.removesuffix('s'))}"
        )

    def __repr__(self) -> str:
        shown = self.frame().drop(columns=["stack", "layer", "head", "method", "loss"])
        return at_prompt(f"Scores of {self}", shown)

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)
