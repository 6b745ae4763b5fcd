"""The fields of a comparison and what is read from them; its page imports no `Comparison`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float64

from headwise._display import counted, printable
from headwise.errors import ArgumentError
from headwise.report._statistic_labels import statistic_label
from headwise.tables import Head

ERROR_RATE = 0.05
CHANGED, UNCHANGED = "changed", "no difference shown"
ONLY_BEFORE, ONLY_AFTER = "only before", "only after"


@dataclass(frozen=True, eq=False)
class ComparisonData:
    """The results of a comparison: all that its page shows. `Comparison` describes the fields."""

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
        sentences = [self._heads_sentence(), *self._largest_sentence()]
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
