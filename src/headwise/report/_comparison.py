"""The result of a comparison: what it says, draws and saves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise._display import counted, printable
from headwise.errors import ArgumentError
from headwise.tables import (
    Head,
    TableFile,
    at_prompt,
    notebook_html,
    plot_heads,
    rows_of,
    statistic_label,
)

ERROR_RATE = 0.05
_LARGE = 0.5  # standard deviations between heads
CHANGED, UNCHANGED = "changed", "no difference shown"
ONLY_BEFORE, ONLY_AFTER = "only before", "only after"
NUMBERS_OF_ROLES = ("effect", "ci_low", "ci_high", "p_adj")
_OF_ROLES = [f"{side}.{number}" for side in ("before", "after") for number in NUMBERS_OF_ROLES]
ROLE_COLUMNS = ("name", "stack", "layer", "head", "role", "change", *_OF_ROLES)
_NUMBERS = ("before", "after", "difference", "size", "ci_low", "ci_high", "p_adj", "texts")
_TEXTS = ("statistic", "outcome", "before_head", "after_head")


@dataclass(frozen=True, eq=False)
class Comparison(TableFile):
    """The differences between two models, head by head.

    Attributes:
        rows: A row per statistic and head. `name` is the head's original address,
            `before_head` and `after_head` its names in the two models ("" where it is not there).
            `before` and `after` are the means, `difference` is after minus before with its
            interval (95 %, bootstrap over texts) from `ci_low` to `ci_high`; `size` is the
            difference in standard deviations of this statistic over the heads before. `p_adj` is
            adjusted over all heads and statistics, `texts` the texts with a row. `outcome` is
            `changed` (p_adj up to 0.05), `no difference shown`, `not tested: ` and what is
            missing, `only before` or `only after`.
        roles: A row for each role of a head, if the roles of both models are known. `change` is
            `won`, `lost`, `kept`, `head removed`, or why the role was not tested.
        titles: The names of the two models; "" if unknown.
        models: The fingerprints of their weights.
        texts: How many texts each of them read.
        paired: Whether both read the same texts.
        tolerance: Differences within a text that count as rounding.
        versions: The versions of the software that made the comparison.
    """

    _schema = ("headwise_comparison", 1)

    rows: pd.DataFrame
    roles: pd.DataFrame | None = None
    titles: tuple[str, str] = ("", "")
    models: tuple[str, str] = ("", "")
    texts: tuple[int, int] = (0, 0)
    paired: bool = True
    tolerance: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def frame(self) -> pd.DataFrame:
        """All rows: name, stack, layer, head, statistic, then the numbers."""
        return self.rows.copy()

    def changed(self) -> pd.DataFrame:
        """The rows with a significant difference, from the largest `size` down."""
        rows = self.rows[self.rows["outcome"] == CHANGED]
        order = rows["size"].abs().sort_values(ascending=False, kind="stable", na_position="last")
        return rows.loc[order.index].reset_index(drop=True)

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """The original address of every head of either model."""
        return tuple(Head.parse(name) for name in dict.fromkeys(self.rows["name"]))

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics that were compared."""
        return tuple(dict.fromkeys(self.rows["statistic"]))

    def values(self, column: str, statistic: str) -> Float64[np.ndarray, " N"]:
        """A column of `rows` for one statistic, in the order of `heads`.

        Raises:
            ArgumentError: there is no such statistic.
        """
        if statistic not in self.statistics:
            raise ArgumentError(
                f"Comparison: there is no statistic {statistic!r}. There are "
                f"{', '.join(self.statistics)}."
            )
        return self.rows.loc[self.rows["statistic"] == statistic, column].to_numpy(np.float64)

    def largest(self) -> Float64[np.ndarray, " N"]:
        """The largest significant `size` of each head, without its sign.

        0 for a head without a significant difference, NaN for one that only one model has.
        """
        rows = self.rows
        sizes = rows["size"].abs().where(rows["outcome"] == CHANGED, 0.0)
        sizes = sizes.mask(rows["outcome"].isin((ONLY_BEFORE, ONLY_AFTER)))
        by_head = sizes.groupby(rows["name"], sort=False).max()
        return by_head.reindex([str(head) for head in self.heads]).to_numpy(np.float64)

    def only(self, outcome: str) -> list[str]:
        """The names of the heads that are `only before` or `only after`."""
        return list(dict.fromkeys(self.rows.loc[self.rows["outcome"] == outcome, "name"]))

    @property
    def summary(self) -> str:
        """How many heads differ, where, by how much at most, and which roles came and went."""
        return " ".join(self.sentences())

    def sentences(self) -> list[str]:
        """The sentences of the summary, safe to print."""
        sentences = [self._heads_sentence(), *self._size_sentence(), *self._largest_sentence()]
        for outcome in (ONLY_BEFORE, ONLY_AFTER):
            names = self.only(outcome)
            if names:
                verb = "exists" if len(names) == 1 else "exist"
                sentences.append(f"{counted(len(names), 'head')} {verb} {outcome}.")
        if self.roles is not None:
            counts = self.roles["change"].value_counts()
            parts = [f"{count} {change}" for change, count in counts.items()]
            sentences.append(f"Roles: {', '.join(parts) or 'none found in either'}.")
        return [*map(printable, sentences)]

    def _heads_sentence(self) -> str:
        compared = len(self.heads) - len(self.only(ONLY_BEFORE)) - len(self.only(ONLY_AFTER))
        heads = counted(compared, "head")
        if not self.rows["p_adj"].notna().any():
            tested = self.rows.loc[self.rows["outcome"].str.startswith("not tested"), "outcome"]
            return f"{heads} compared: {next(iter(tested), 'none was tested')}."
        differing = self.changed()["name"].nunique()
        verb = "differs" if differing == 1 else "differ"
        texts = counted(self.texts[0], "text")
        if not self.paired:
            texts = f"{texts} before and {self.texts[1]:,} others after"
        unchanged = "" if differing else ": no difference is shown"
        return f"{differing} of {heads} {verb} on {texts}{unchanged}."

    def _size_sentence(self) -> list[str]:
        """How large the differences are: with many texts the smallest one is significant."""
        sizes = self.largest()
        sizes = sizes[sizes > 0]
        if not len(sizes):
            return []
        large = int((sizes >= _LARGE).sum())
        return [
            f"{large or 'None'} of them by {_LARGE} standard deviations between heads or more, the "
            f"largest by {sizes.max():.2g}."
        ]

    def _largest_sentence(self) -> list[str]:
        changed = self.changed()
        if changed.empty:
            return []
        row = changed.iloc[0]
        label = statistic_label(row["statistic"]).lower()
        line = (
            f"The largest difference: {label} of {row['name']}, {row['before']:.3g} → "
            f"{row['after']:.3g} ({row['ci_low']:+.3g} to {row['ci_high']:+.3g})."
        )
        first = min(map(Head.parse, changed["name"]), key=lambda head: head.layer)
        return [line, f"The first layer with a difference is {str(first).rpartition('.')[0]}."]

    def plot(self, statistic: str | None = None, *, ax: Any = None) -> Any:
        """Draw the difference of every head, a row per layer; a head of one model is a cross.

        Args:
            statistic: The name of a statistic. None is the largest significant `size` of any.
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes.
        Raises:
            ArgumentError: there is no such statistic, or `ax` is not axes.
            MissingPackageError: matplotlib is not installed.
        """
        if statistic is None:
            values, label = self.largest(), "largest difference (deviations of heads)"
        else:
            values, label = self.values("difference", statistic), f"{statistic}, after − before"
        return plot_heads("Comparison.plot", self.heads, values, label, ax)

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        roles = None if self.roles is None else self.roles.astype(object)
        about = {
            "roles": None if roles is None else roles.where(roles.notna(), None).values.tolist(),
            **{name: list(getattr(self, name)) for name in ("titles", "models", "texts")},
            "paired": self.paired,
            "tolerance": self.tolerance,
            "versions": dict(self.versions),
        }
        return self.frame(), about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "Comparison":
        roles = about["roles"]
        if roles is not None:
            roles = pd.DataFrame(roles, columns=list(ROLE_COLUMNS))
            roles = rows_of(roles, _OF_ROLES, ("role", "change"))
        pairs = [tuple(about[name]) for name in ("titles", "models", "texts")]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"titles, models and texts are {pairs}, not pairs")
        titles, models, texts = pairs
        return cls(
            rows=rows_of(frame, _NUMBERS, _TEXTS),
            roles=roles,
            titles=(str(titles[0]), str(titles[1])),
            models=(str(models[0]), str(models[1])),
            texts=(int(texts[0]), int(texts[1])),
            paired=bool(about["paired"]),
            tolerance=float(about["tolerance"]),
            versions=dict(about["versions"]),
        )

    def __str__(self) -> str:
        return self.summary

    def __repr__(self) -> str:
        columns = ["name", "statistic", "before", "after", "difference", "ci_low", "ci_high"]
        return at_prompt(f"Comparison: {self.summary}", self.changed()[[*columns, "p_adj"]])

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)
