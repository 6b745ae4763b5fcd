"""HeadTable: one row per head and one column per statistic, without the model or torch.

A table holds sums, not means, so tables of two runs add up to the table of both. Standard errors
take the text as the unit, because tokens of one text are not independent of each other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from headwise._display import counted
from headwise.errors import ArgumentError, HeadError
from headwise.files import typed
from headwise.tables._bootstrap import ratio_interval, share_interval
from headwise.tables._figures import at_prompt, notebook_html, plot_heads
from headwise.tables._heads import Head, HeadLike, address_columns, resolve_heads
from headwise.tables._statistics import STATISTICS
from headwise.tables._table_file import (
    TableFile,
    heads_of_rows,
    indices_of,
    numbers_of,
    originals_of_rows,
)
from headwise.tables._totals import COLUMNS, TEXT_COLUMNS, Column, TextSums, Totals

__all__ = ["HeadTable", "sum_of_hashes"]


def sum_of_hashes(hashes: Iterable[int]) -> str:
    """A hash of several things in any order, from the SHA-256 of each, in hexadecimal digits."""
    return f"{sum(hashes) % 2**256:064x}"


@dataclass(frozen=True, eq=False)
class HeadTable(TableFile):
    """Statistics of every head: means, standard errors, counts and maxima.

    A statistic that does not apply to a head is NaN, never 0. Tables of the same model can be
    added in any order.

    Attributes:
        heads: The address of each row.
        kv_heads: The key/value head that each head reads.
        totals: The sums behind each statistic, by name.
        covered: How many queries were captured, and how many tokens the layer received.
        queries: "eligible" or "all": the queries that the means are taken over (see `Request`).
        model: The fingerprint of the model's weights.
        versions: The versions of the software that made the table, and as `weights` the kind of
            quantized weights that the model was read from, if they were quantized.
        original: In a pruned or grouped model, each head's address in the original model, None
            for a head of zeros. Empty if it is not known.
        skipped: The number of texts that the model refused (see `BatchObserver`).
        texts: The number of texts, or pieces of long ones, and the sum of the SHA-256 of their
            tokens, which is the same in any order. Empty for passes of your own, whose texts the
            table does not know.

    Example:
        >>> zeros = np.zeros((1, 1))
        >>> entropy = Totals.of_texts(zeros + 6.0, zeros + 4.0, np.array([2.0]))
        >>> table = HeadTable((Head("", 5, 3),), np.array([1]), {"entropy": entropy})
        >>> (table + table).frame()
            name stack  layer  head  entropy
        0  L5.H3            5     3      1.5
    """

    _schema = ("headwise", 1)

    heads: tuple[Head, ...]
    kv_heads: Int64[np.ndarray, " N"]
    totals: Mapping[str, Totals]
    covered: Float64[np.ndarray, "2 N"] | None = None
    queries: str = "eligible"
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    original: tuple[Head | None, ...] = ()
    skipped: int = 0
    texts: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics, in the order of the request."""
        return tuple(self.totals)

    @property
    def coverage(self) -> Column:
        """The share of all queries that each head's statistics cover, 0 … 1.

        Below 1 where the attention of some queries is not computed, or could not be captured.
        """
        if self.covered is None:
            return np.ones(len(self.heads))
        captured, tokens = self.covered
        return np.minimum(1.0, captured / np.maximum(tokens, 1.0))

    def mean(self, statistic: str) -> Column:
        """The mean over all eligible rows; NaN for a head without any."""
        return self._of(statistic).mean()

    def uniform(self, statistic: str) -> Column:
        """The mean under uniform attention: equal weights on all visible keys of each row.

        NaN for a statistic that does not depend on the weights alone.
        """
        return self._of(statistic).uniform_mean()

    def standard_error(self, statistic: str) -> Column:
        """The standard error of the mean over texts; NaN for fewer than two texts."""
        return self._of(statistic).standard_error()

    def count(self, statistic: str) -> Column:
        """The number of eligible rows."""
        return self._of(statistic).count

    def maximum(self, statistic: str) -> Column:
        """The largest value of any eligible row; NaN for a head without any."""
        return self._of(statistic).maximum

    def per_text(self, statistic: str) -> TextSums:
        """The sums of each text, in the order of the run.

        Every statistic has the same texts as rows, so one resample of texts serves all of them.

        Raises:
            ArgumentError: the table holds no sums per text.
        """
        kept = self._of(statistic).per_text
        if kept is None:
            raise ArgumentError(
                f"HeadTable: the sums of {statistic!r} in each text were not kept. "
                f"Observe with Request(per_text=True)."
            )
        return kept

    def interval(self, statistic: str, level: float = 0.95) -> tuple[Column, Column]:
        """The studentized bootstrap interval of the mean, texts resampled with replacement.

        A share of rows, `top(name)`, has Wilson's interval, which keeps some width even if all
        texts are right, or all are wrong. NaN for a head with eligible rows in fewer than two
        texts. It is too narrow for a head whose mean a few texts decide.

        Args:
            statistic: The name of a statistic.
            level: The coverage of the interval, between 0 and 1.
        Raises:
            ArgumentError: `level` is out of range, or the table holds no sums per text.
        """
        if not 0 < level < 1:
            raise ArgumentError(f"HeadTable.interval: level={level}. Give a level such as 0.95.")
        kept = self.per_text(statistic)
        if statistic.startswith("top("):
            return share_interval(kept.total, kept.count, level)
        return ratio_interval(kept.total, kept.count, studentized=True, level=level)

    def _of(self, statistic: str) -> Totals:
        if statistic not in self.totals:
            raise ArgumentError(
                f"HeadTable: there is no statistic {statistic!r}. "
                f"There are {', '.join(self.totals) or 'none'}."
            )
        return self.totals[statistic]

    def row(self, head: HeadLike) -> int:
        """The row of a head, by any form of its name."""
        return self.heads.index(resolve_heads(head, self.heads)[0])

    def __add__(self, other: "HeadTable") -> "HeadTable":
        """The table of both runs.

        Raises:
            ArgumentError: the tables are of different models or have different statistics.
            HeadError: the tables have different heads.
        """
        if self.model != other.model:
            raise ArgumentError(
                f"HeadTable: models {self.model[:12]!r} and {other.model[:12]!r} differ. "
                f"Add tables of the same weights."
            )
        if set(self.heads) != set(other.heads):
            raise HeadError(
                f"HeadTable: {len(self.heads)} and {len(other.heads)} heads do not match. "
                f"Add tables made with the same layers."
            )
        if set(self.totals) != set(other.totals):
            odd = ", ".join(sorted(set(self.totals) ^ set(other.totals)))
            raise ArgumentError(
                f"HeadTable: only one of the two has {odd}. Add tables of the same request."
            )
        if self.queries != other.queries:
            raise ArgumentError(
                f"HeadTable: means over {self.queries!r} and {other.queries!r} queries do not add. "
                f"Add tables of the same request."
            )
        rows = {head: row for row, head in enumerate(other.heads)}
        order = [rows[head] for head in self.heads]
        totals = {
            name: sums + other.totals[name].select(lambda column: column[order])
            for name, sums in self.totals.items()
        }
        known = [] if self.covered is None else [self.covered]
        known += [] if other.covered is None else [other.covered[:, order]]
        covered = np.sum(known, 0) if known else None
        original = self.original or tuple(other.original[row] for row in order if other.original)
        skipped, texts = self.skipped + other.skipped, dict[str, int | str]()
        if self.texts and other.texts:
            texts = {"texts": int(self.texts["texts"]) + int(other.texts["texts"])}
            texts["sha256"] = sum_of_hashes(int(str(x.texts["sha256"]), 16) for x in (self, other))
        return replace(
            self, totals=totals, covered=covered, original=original, skipped=skipped, texts=texts
        )

    def frame(self, detail: bool = False) -> pd.DataFrame:
        """A tidy frame: name, stack, layer, head, then the mean of each statistic.

        A column `coverage` is added if it is below 1 for any head. The table of a pruned or
        grouped model has a column `original` with each head's name in the original model, if it
        is known.

        Args:
            detail: Whether to add, after each mean, its standard error (`.se`), the number of
                rows (`.count`), the largest value (`.max`) and the mean under uniform attention
                (`.uniform`), and the kv head of each row.
        """
        columns = address_columns(self.heads)
        if (self.coverage < 1).any():
            columns["coverage"] = self.coverage
        if self.original:
            columns["original"] = [str(head or "") for head in self.original]
        if detail:
            columns["kv_head"] = self.kv_heads
        for name, totals in self.totals.items():
            columns[name] = totals.mean()
            if detail:
                columns[f"{name}.se"] = totals.standard_error()
                columns[f"{name}.count"] = totals.count
                columns[f"{name}.max"] = totals.maximum
                columns[f"{name}.uniform"] = totals.uniform_mean()
        return pd.DataFrame(columns)

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        columns: dict[str, Any] = {str(name): column for name, column in self.frame().items()}
        columns["kv_head"] = self.kv_heads
        if self.covered is not None:
            columns["covered.queries"], columns["covered.tokens"] = self.covered
        for name, totals in self.totals.items():
            for column, values in totals.columns().items():
                columns[f"{name}.{column}"] = values
        about = {
            "model": self.model,
            "versions": dict(self.versions),
            "statistics": list(self.totals),
            "queries": self.queries,
            "original": bool(self.original),
            "skipped": self.skipped,
            "texts": dict(self.texts),
            "per_text": any(totals.per_text is not None for totals in self.totals.values()),
        }
        return pd.DataFrame(columns), about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "HeadTable":
        def totals(name: str) -> Totals:
            columns: dict[str, Any] = {
                part: numbers_of(frame, f"{name}.{part}") for part in COLUMNS
            }
            if not about["per_text"]:
                return Totals(**columns)
            cells = {part: frame[f"{name}.{part}"].tolist() for part in TEXT_COLUMNS}
            return Totals(**columns, per_text=TextSums.from_columns(cells))

        parts = ("covered.queries", "covered.tokens")
        covers = any(name in frame for name in parts)
        return cls(
            heads=heads_of_rows(frame),
            kv_heads=indices_of(frame, "kv_head"),
            totals={typed(name, str): totals(name) for name in about["statistics"]},
            covered=np.stack([numbers_of(frame, part) for part in parts]) if covers else None,
            queries=str(about["queries"]),
            model=str(about["model"]),
            versions=dict(about["versions"]),
            original=originals_of_rows(frame) if about["original"] else (),
            skipped=int(about["skipped"]),
            texts=dict(about["texts"]),
        )

    def __repr__(self) -> str:
        frame = self.frame().drop(columns=["stack", "layer", "head"])
        kind = f" from {self.versions['weights']}" if "weights" in self.versions else ""
        return at_prompt(
            f"HeadTable of {counted(len(self.heads), 'head')}, model {self.model}{kind}", frame
        )

    def plot(self, statistic: str, *, ax: Any = None) -> Any:
        """Draw the mean of a statistic for every head, a row per layer.

        Args:
            statistic: The name of a statistic.
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes; their figure has a color bar with the unit.
        Raises:
            ArgumentError: there is no such statistic, or `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        unit = STATISTICS[statistic].unit if statistic in STATISTICS else "share"
        label = f"{statistic} ({unit})"
        return plot_heads("HeadTable.plot", self.heads, self.mean(statistic), label, ax)

    def _repr_html_(self) -> str | None:
        if not self.statistics:
            return None  # notebooks show the text
        return notebook_html(repr(self), lambda: self.plot(self.statistics[0]))
