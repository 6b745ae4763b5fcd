"""The result of a comparison: what it draws, writes, saves and shows."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headwise.files import as_path
from headwise.report._html import write_html
from headwise.report.comparison._comparison_data import ComparisonData
from headwise.report.comparison._page import render
from headwise.tables import (
    Head,
    TableFile,
    at_prompt,
    grid_html,
    numbers_of,
    plot_heads,
    texts_of,
)

_NUMBERS_OF_ROLES = ("effect", "ci_low", "ci_high", "p_adj")
ROLE_COLUMNS = (
    "name", "stack", "layer", "head", "role", "change",
    *(f"{side}.{number}" for side in ("before", "after") for number in _NUMBERS_OF_ROLES),
)  # fmt: skip
_NUMBERS = ("before", "after", "difference", "size", "ci_low", "ci_high", "p_adj", "texts")
_TEXTS = ("name", "stack", "statistic", "outcome", "before_head", "after_head")


class Comparison(ComparisonData, TableFile):
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

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one HTML file without a script that needs no network.

        Raises:
            ArgumentError: the path does not end in .html.
            OutputError: the file cannot be written; no partial file is left behind.
        """
        return write_html("report", render(self), as_path("Comparison.report", path))

    def _content(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        roles = None if self.roles is None else self.roles.astype(object)
        about = {
            "roles": None if roles is None else roles.where(roles.notna(), None).values.tolist(),
            "titles": list(self.titles),
            "models": list(self.models),
            "texts": list(self.texts),
            "paired": self.paired,
            "tolerance": self.tolerance,
            "versions": dict(self.versions),
        }
        return self.frame(), about

    @classmethod
    def _built(cls, frame: pd.DataFrame, about: dict[str, Any]) -> "Comparison":
        heads = [Head.parse(name) for name in texts_of(frame, "name")]
        columns: dict[str, Any] = {name: numbers_of(frame, name) for name in _NUMBERS}
        columns |= {name: texts_of(frame, name) for name in _TEXTS}
        columns |= {"layer": [head.layer for head in heads], "head": [head.head for head in heads]}
        frame.attrs.clear()
        roles = about["roles"]
        pairs = [tuple(about[name]) for name in ("titles", "models", "texts")]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"titles, models and texts are {pairs}, not pairs")
        titles, models, texts = pairs
        return cls(
            rows=pd.DataFrame({name: columns[name] for name in map(str, frame)}),
            roles=None if roles is None else _roles(roles),
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
        title = " → ".join(filter(None, self.titles))
        heading = f"{title}: {self.summary}" if title else self.summary
        return grid_html(heading, self.heads, {"largest significant difference": self.largest()})


def _roles(rows: list[list[Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(ROLE_COLUMNS))
    texts = {"name", "stack", "role", "change"}
    columns: dict[str, Any] = {
        name: texts_of(frame, name) if name in texts else numbers_of(frame, name)
        for name in ROLE_COLUMNS
    }
    indices = {name: columns[name].astype(np.int64) for name in ("layer", "head")}
    return pd.DataFrame(columns | indices)
