"""The sums behind each statistic of a head: they add up over texts and runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from headwise.errors import ArgumentError
from headwise.tables._bootstrap import DRAWS, has_interval, interval_of, rate, resampled_ratios

__all__ = ["COLUMNS", "TEXT_COLUMNS", "Column", "TextSums", "Totals"]

Column = Float64[np.ndarray, " N"]


@dataclass(frozen=True)
class TextSums:
    """The sums of one statistic in each of `M` texts, for `N` heads.

    The mean over any of the texts is the sum of their totals divided by the sum of their counts.

    Attributes:
        count: The number of eligible rows.
        total: The sum of the statistic over these rows.
        uniform: The same sum under uniform attention; NaN where that has no meaning.
    """

    count: Float64[np.ndarray, "M N"]
    total: Float64[np.ndarray, "M N"]
    uniform: Float64[np.ndarray, "M N"]

    def __add__(self, other: "TextSums") -> "TextSums":
        return TextSums(
            *(np.concatenate(pair) for pair in zip(self.parts, other.parts, strict=True))
        )

    def mean(self) -> Column:
        """The mean over all texts; NaN for a head without an eligible row."""
        return rate(self.total.sum(0), self.count.sum(0))

    def difference_interval(self, other: "TextSums", *, paired: bool) -> tuple[Column, Column]:
        """The bootstrap interval (95 %) of the other mean minus this one.

        Args:
            other: The sums of the same columns in the same texts, or in others.
            paired: Whether the texts are the same: then both are resampled together.
        """
        known = has_interval(self.count) & has_interval(other.count)
        seeds = 0, 0 if paired else 1
        before, after = (
            resampled_ratios(sums.total, sums.count, DRAWS, each)
            for sums, each in zip((self, other), seeds, strict=True)
        )
        return interval_of((after - before)[:, known], 0.95, known)

    @property
    def parts(self) -> tuple[Float64[np.ndarray, "M N"], ...]:
        return self.count, self.total, self.uniform

    def columns(self) -> dict[str, list[Float64[np.ndarray, " M"]]]:
        """The sums as columns of a file: a cell holds the sums of one head in every text."""
        return {name: list(part.T) for name, part in zip(TEXT_COLUMNS, self.parts, strict=True)}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]]) -> "TextSums":
        """The sums that `columns` wrote."""
        cells = ([np.asarray(cell, np.float64) for cell in columns[c]] for c in TEXT_COLUMNS)
        parts = [np.stack(column, axis=1) for column in cells]
        if len(shapes := {part.shape for part in parts}) > 1:
            raise ValueError(f"sums of each text of the shapes {sorted(shapes)}")
        return cls(*parts)


TEXT_COLUMNS = tuple(f"per_text.{part}" for part in TextSums.__dataclass_fields__)


@dataclass(frozen=True)
class Totals:
    """Sums of one statistic over its eligible rows, for every head.

    Three sums over texts give the standard error of the mean with the text as the unit: with `S`
    the sum and `n` the number of rows of one text, they are ΣS², ΣSn and Σn². `uniform` is the sum
    of the statistic under uniform attention over the same visible keys; NaN where that has no
    meaning. `per_text` holds the sums of each text, if the request keeps them.
    """

    count: Column
    total: Column
    uniform: Column
    maximum: Column
    texts: Column
    total_squared: Column
    cross: Column
    count_squared: Column
    per_text: TextSums | None = None

    @classmethod
    def of_texts(
        cls,
        totals: Float64[np.ndarray, "M N"],
        counts: Float64[np.ndarray, "M N"],
        maximum: Column,
        uniform: Float64[np.ndarray, "M N"] | None = None,
        keep: bool = False,
    ) -> "Totals":
        """Add up the sums and row counts of `M` texts; `keep` also stores those of each text."""
        uniform = np.full_like(totals, np.nan) if uniform is None else uniform
        return cls(
            count=counts.sum(0),
            total=totals.sum(0),
            uniform=uniform.sum(0) if len(uniform) else np.full_like(maximum, np.nan),
            maximum=maximum,
            texts=(counts > 0).sum(0).astype(np.float64),
            total_squared=(totals**2).sum(0),
            cross=(totals * counts).sum(0),
            count_squared=(counts**2).sum(0),
            per_text=TextSums(counts, totals, uniform) if keep else None,
        )

    def __add__(self, other: "Totals") -> "Totals":
        """The totals of other texts on the same heads."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in COLUMNS}
        # fmax: the maximum of a side without eligible rows is NaN.
        sums["maximum"] = np.fmax(self.maximum, other.maximum)
        if self.per_text is None or other.per_text is None:
            if self.per_text is not other.per_text:
                raise ArgumentError(
                    "HeadTable: only one of the two has per_text sums. "
                    "Add tables of the same request."
                )
            return Totals(**sums)
        return Totals(**sums, per_text=self.per_text + other.per_text)

    def columns(self) -> dict[str, Any]:
        """The sums as columns of a file with a row per head, those of each text included."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        return columns if self.per_text is None else columns | self.per_text.columns()

    def mean(self) -> Column:
        return rate(self.total, self.count)

    def uniform_mean(self) -> Column:
        return rate(self.uniform, self.count)

    def standard_error(self) -> Column:
        """The standard error of the mean over texts; NaN for fewer than two texts."""
        # Σ(S − mean·n)², expanded, so that three sums over texts are enough and tables add up.
        mean = np.nan_to_num(self.mean())
        squared = self.total_squared - 2 * mean * self.cross + mean**2 * self.count_squared
        spread = rate(np.maximum(squared, 0.0) * self.texts, np.maximum(self.texts - 1, 0))
        return rate(np.sqrt(spread), self.count)

    def select(self, choose: Callable[[Column], Column]) -> "Totals":
        """Select or reorder heads, by a function that is applied to each column."""
        chosen: dict[str, Any] = {name: choose(getattr(self, name)) for name in COLUMNS}
        if self.per_text is None:
            return replace(self, **chosen)
        texts = TextSums(*(choose(part.T).T for part in self.per_text.parts))
        return replace(self, **chosen, per_text=texts)


COLUMNS = tuple(name for name in Totals.__dataclass_fields__ if name != "per_text")
