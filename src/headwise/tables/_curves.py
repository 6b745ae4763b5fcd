"""Pruning curves: the loss of a model as heads are removed in different orders."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from headwise._display import printable
from headwise.errors import ArgumentError, ShapeError
from headwise.files import JsonFile, typed
from headwise.tables._bootstrap import TAILS, bootstrap_means, mean_interval
from headwise.tables._figures import at_prompt, notebook_html, plain_legend, plot_axes

__all__ = ["Curves", "Elbow"]

# Distinguishable with red-green blindness, and in print; several orders share a band of gray.
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#448361", "#ad1a72", "#64473a")
_BAND = "#8a8a8a"
_UNITS = {"lm": "nats per token", "masked-lm": "nats per token", "embedding": "1 − cosine"}


@dataclass(frozen=True)
class Elbow:
    """How many heads can be removed before the loss grows too much, with an interval.

    Attributes:
        heads: The last point before the growth of the mean loss reaches the allowed growth.
        low: The lower end of the bootstrap interval of that number, texts resampled with
            replacement. NaN for a single text.
        high: The upper end.
        last: The last point of the curve. An elbow there means this many heads or more.
    """

    heads: int
    low: float
    high: float
    last: int

    def __str__(self) -> str:
        """Such as `12 (11 to 13)`."""
        if np.isnan(self.low):
            return self._format(float(self.heads))
        ends = dict.fromkeys([self._format(self.low), self._format(self.high)])
        return f"{self._format(float(self.heads))} ({' to '.join(ends)})"

    def _format(self, heads: float) -> str:
        return f"≥ {heads:g}" if heads >= self.last else f"{heads:g}"


@dataclass(frozen=True, eq=False)
class Curves(JsonFile):
    """The loss of each text as heads are removed, for several orders of removal.

    Attributes:
        removed: The number of heads removed at each point, from 0 on.
        n_heads: The number of heads in the model.
        per_text: By name of an order, the loss of each text at each point. A name may stand for
            several orders, such as the random ones.
        loss: The name of the loss.
        compares: Whether the loss compares with the full model, whose own loss is then 0.
        score: The name of a task's score; "" for none.
        scores: By name of an order, the task's score at each point.
    Raises:
        ShapeError: the points do not begin at 0 and rise, or a curve has another number of
            points.

    Example:
        >>> values = np.array([[[0.0, 0.0], [0.5, 1.5]]])
        >>> curves = Curves(np.array([0, 3]), 12, {"half-gate": values}, "embedding")
        >>> curves.frame()[["order", "removed", "share", "loss"]]
               order  removed  share  loss
        0  half-gate        0   0.00   0.0
        1  half-gate        3   0.25   1.0
    """

    _format = "headwise-curves/1"
    _problem = "holds no curves"
    _indent = None

    removed: Int64[np.ndarray, " K"]
    n_heads: int
    per_text: Mapping[str, Float64[np.ndarray, "orders K M"]]
    loss: str = ""
    compares: bool = False
    score: str = ""
    scores: Mapping[str, Float64[np.ndarray, "orders K"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        points = {values.shape[1] for values in self.per_text.values()}
        rising = len(self.removed) and self.removed[0] == 0 and (np.diff(self.removed) > 0).all()
        if not rising or points != {len(self.removed)}:
            raise ShapeError(
                f"Curves: points at {self.removed.tolist()} heads and curves of {sorted(points)}. "
                f"Give rising points from 0 on, and each curve a value at each point."
            )

    def __repr__(self) -> str:
        shown = self.frame()[["order", "removed", "loss", "low", "high"]]
        title = f"Curves of the loss {self.loss}, as some of {self.n_heads} heads are removed"
        return at_prompt(title, shown.rename(columns={"order": "name"}))

    def mean(self, order: str) -> Float64[np.ndarray, "orders K"]:
        """The mean over texts at each point, for each order of that name."""
        return self._of(order).mean(-1)

    def interval(self, order: str) -> tuple[Float64[np.ndarray, " K"], Float64[np.ndarray, " K"]]:
        """The bootstrap interval (95 %) of the mean, texts resampled with replacement.

        For a name with several orders, the least and the largest mean of any order.
        """
        values = self._of(order)
        if len(values) > 1:
            means = values.mean(-1)
            return means.min(0), means.max(0)
        return mean_interval(values[0].T)

    def allowance(self, share: float = 0.01) -> float:
        """This share of the full model's loss, or of 1 if the loss compares with the full model."""
        full = next(iter(self.per_text.values()))[0, 0].mean()
        return share if self.compares else share * float(full)

    def of_score(self) -> "Curves":
        """The same curves of what the task's score loses, in place of the loss.

        Raises:
            ArgumentError: the curves have no score.
        """
        if not self.score:
            raise ArgumentError(
                f"Curves: the loss {self.loss!r} has no score of a task. Measure the loss of "
                f"labels or of pairs."
            )
        lost = {name: (x[:, :1] - x)[..., None] for name, x in self.scores.items()}
        return replace(
            self, per_text=lost, loss=f"drop of {self.score}", compares=True, score="", scores={}
        )

    def elbow(self, order: str, allowed: float) -> Elbow:
        """The number of removed heads at the last point before the mean loss grows by `allowed`.

        Its interval (95 %) is that of resamples of the texts, drawn with replacement. For a name
        with several orders, it is the median, and the resamples of all orders count. A single
        order is taken as given: for the texts that it was scored on to count as well, measure
        `scores.redrawn_orders()` under one name.

        Args:
            allowed: The allowed growth of the mean loss, such as `allowance()`.
        Raises:
            ArgumentError: there is no such order, or `allowed` is not above 0.
        """
        if not allowed > 0:
            raise ArgumentError(f"Curves: allowed={allowed}. Give a growth of the loss above 0.")

        def last_within(growth: Float64[np.ndarray, "draws K"]) -> Int64[np.ndarray, " draws"]:
            """The last point before the growth reaches what is allowed."""
            return self.removed[np.cumprod(growth < allowed, axis=1).sum(1) - 1]

        values = self._of(order)
        growth, last = values - values[:, :1], int(self.removed[-1])
        heads = int(np.median(last_within(growth.mean(-1))))
        if growth.shape[-1] == 1:
            return Elbow(heads, np.nan, np.nan, last)
        # All orders share the resamples, which take longer to draw than to use.
        means = bootstrap_means(np.moveaxis(growth, -1, 0).reshape(growth.shape[-1], -1))
        drawn = last_within(means.reshape(-1, growth.shape[1]))
        low, high = np.quantile(drawn, TAILS, method="nearest")
        return Elbow(heads, float(low), float(high), last)

    def frame(self, allowed: float | None = None) -> pd.DataFrame:
        """A row per order and point: the mean loss, its interval, the 95th percentile over texts.

        The interval of several orders is their range. A task's score has a column of its name,
        and columns `.low` and `.high` with its range.

        Args:
            allowed: The allowed growth of the loss. It adds columns with the elbow of each order.
        """
        return pd.concat([self._rows(order, allowed) for order in self.per_text], ignore_index=True)

    def plot(self, *others: "Curves", allowed: float | None = None, ax: Any = None) -> Any:
        """Draw the mean loss against the number of removed heads; several orders become a band.

        Args:
            others: Curves of the same model and loss, drawn dashed. An order whose name extends
                one of the first curves, such as `half-gate, recovered`, has its color.
            allowed: The allowed growth of the mean loss, such as `allowance()`. It is drawn as a
                dotted line, and each order's elbow as a dot with its interval.
            ax: Matplotlib axes to draw on. None makes a figure.
        Returns:
            The axes.
        Raises:
            ArgumentError: `ax` is not axes, or `allowed` is not above 0.
            MissingPackageError: matplotlib is not installed.
        """
        ax = plot_axes("Curves.plot", ax, 8.0, 4.2)
        colors: dict[str, str] = {}
        unused = cycle(_COLORS)
        for curves in (self, *others):
            for name, orders in curves.per_text.items():
                several, dashed = len(orders) > 1, curves is not self
                extended = [x for x in colors if dashed and name.startswith(f"{x}, ")]
                color = colors.get(max(extended, key=len, default=""))
                color = color or (_BAND if several else next(unused))
                colors |= {} if dashed else {name: color}
                curves._plot_order(name, allowed, ax, color, "--" if dashed else "-")
        if allowed is not None:
            full = float(next(iter(self.per_text.values()))[:, 0].mean())
            more = f"{allowed:.2g} more"
            ax.axhline(full + allowed, color="#333333", linestyle=":", label=more)
        unit = _UNITS.get(self.loss.partition(" ")[0])
        loss = f"mean loss: {self.loss}" + (f", {unit}" if unit else "")
        ax.set_xlabel(f"heads removed, of {self.n_heads}")
        ax.set_ylabel(printable(loss), parse_math=False)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlim(left=0)
        plain_legend(ax)
        return ax

    def _plot_order(
        self, name: str, allowed: float | None, ax: Any, color: str, style: str
    ) -> None:
        """Draw the mean of an order: several orders with their band, one with its elbow."""
        mean, n_orders = self.mean(name).mean(0), len(self.per_text[name])
        label = f"{name}, {n_orders} orders" if n_orders > 1 else name
        if n_orders > 1:
            ax.fill_between(
                self.removed, *self.interval(name), color=color, alpha=0.25, linewidth=0
            )
        if allowed is not None:
            elbow = self.elbow(name, allowed)
            label = f"{label}: {elbow}"
            height = float(mean[self.removed == elbow.heads][0])
            if n_orders == 1 and not np.isnan(elbow.low):  # NaN for a single text
                ax.plot([elbow.low, elbow.high], [height, height], "|-", color=color, linewidth=1)
            if n_orders == 1:
                ax.plot(elbow.heads, height, "o", color=color)
        ax.plot(self.removed, mean, style, color=color, label=printable(label))

    def _content(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def _built(cls, content: dict[str, Any]) -> "Curves":
        removed = np.array([typed(number, int) for number in content["removed"]])
        losses, scores = (
            {name: np.array(values, np.float64) for name, values in content[part].items()}
            for part in ("per_text", "scores")
        )
        n_heads, score = typed(content["n_heads"], int), typed(content["score"], str)
        if not removed[-1] <= n_heads:
            raise ValueError(f"{removed[-1]} of {n_heads} heads removed")
        wrong = [
            x for x in losses.values() if x.ndim != 3 or not x.size or not np.isfinite(x).all()
        ]
        if wrong or not losses:
            raise ValueError("a curve without losses")
        if set(scores) - set(losses) or (score and set(scores) != set(losses)):
            raise ValueError(f"scores of {sorted(scores)}, losses of {sorted(losses)}")
        for name, values in scores.items():
            if values.shape != losses[name].shape[:2]:
                raise ValueError(f"scores of {values.shape}, losses of {losses[name].shape}")
        loss, compares = typed(content["loss"], str), typed(content["compares"], bool)
        return cls(removed, n_heads, losses, loss, compares, score, scores)

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), self.plot)

    def _rows(self, order: str, allowed: float | None) -> pd.DataFrame:
        values = self.per_text[order]
        low, high = self.interval(order)
        columns = {
            "order": order,
            "removed": self.removed,
            "share": self.removed / self.n_heads,
            "loss": values.mean((0, 2)),
            "low": low,
            "high": high,
            "p95": np.quantile(values, 0.95, axis=2).mean(0),
        }
        if self.score:
            scores = self.scores[order]
            columns[self.score] = scores.mean(0)
            columns |= {f"{self.score}.low": scores.min(0), f"{self.score}.high": scores.max(0)}
        if allowed is not None:
            elbow = self.elbow(order, allowed)
            columns |= {"elbow": elbow.heads, "elbow.low": elbow.low, "elbow.high": elbow.high}
        return pd.DataFrame(columns)

    def _of(self, order: str) -> Float64[np.ndarray, "orders K M"]:
        if order not in self.per_text:
            raise ArgumentError(
                f"Curves: there is no order {order!r}. There are {', '.join(self.per_text)}."
            )
        return self.per_text[order]
