"""QK-clip: scale the queries and keys of heads whose logits have grown too large."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from headwise._display import type_of
from headwise.capture import Site
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import check_weights
from headwise.monitor._monitor import HeadMonitor, TrainerEvents
from headwise.monitor._step_statistics import StepStatistics
from headwise.ownership import LogitRows, find_logit_rows, first_batch, scale_rows
from headwise.tables import Head

_EPS = float(np.finfo(np.float32).eps)
_LEAST_MARGIN = 8 * _EPS  # logits are sums of rounded products in float32
_NAMED = 8  # heads named in a message; the others are counted


@dataclass(frozen=True)
class ClippedHead:
    """A head whose largest logit passed the bar.

    Attributes:
        max_logit: Its largest logit, before any softcap.
        factor: What its logits were multiplied by, 0 … 1.
    """

    head: Head
    max_logit: float
    factor: float


@dataclass(frozen=True)
class ClipReport:
    """What `QKClip.step` did.

    Attributes:
        step: The optimizer step.
        watched: Whether the monitor watched it. If not, no logit is known and nothing is scaled.
        heads: The heads that were clipped.
    """

    step: int
    watched: bool
    heads: tuple[ClippedHead, ...]

    def __str__(self) -> str:
        if not self.watched:
            return f"step {self.step}: not watched"
        named = [f"{x.head} ({x.max_logit:.4g}, times {x.factor:.3g})" for x in self.heads]
        more = [f"{len(named) - _NAMED} more"] if len(named) > _NAMED else []
        return f"step {self.step}: clipped {', '.join([*named[:_NAMED], *more]) or 'no head'}"


class QKClip(TrainerEvents):
    """QK-clip during training: bounds the attention logits of every head, by scaling weights.

    Call `step()` after the optimizer's step and the monitor's. If the largest logit of a head
    exceeded `max_logit` in that step, its logits are scaled by `factor = max_logit / largest`: its
    queries and its keys by the square root each. Keys that several heads share are scaled by the
    part that all of those heads need, and the queries of each head by the rest, so the logits of
    every head are scaled by exactly its own factor. Where a part of the keys belongs to all heads
    (the rotated part of latent attention), the queries are scaled by the whole factor there. Layers
    that share their weights are scaled by the smallest of their factors. This scales weights
    and biases of projections, or the gains behind them if these belong to single heads. While no
    head exceeds the bar, no bit changes.

    The largest logit is that of `scale · q·k` over visible keys, before any softcap and without
    position biases, over all ranks of the monitor; a capped one is inferred, up to eight times the
    cap. It is that of the step's batches under the weights before the step: the next batch may pass
    the bar. If the monitor watches only every n-th step, the steps in between are not clipped:
    watch every step (`every=1`) to bound all of them.

    Which weights scale which head is found once, when the clip is made, by running the model in
    evaluation mode on an example input. Gradients show whether exactly the logits of each head grow
    with them. The weights may be sharded by FSDP2, or be DTensors along one axis.

    A clip is a callback of `transformers.Trainer`, after its monitor: `callbacks=[monitor, clip]`.

    Args:
        monitor: Watches `max_logit` of the model that is trained. Its layers are clipped.
        max_logit: The bar, above 0.
        reference: A batch that the model can be run on, or a list of batches whose first one is
            used: keyword arguments, a tuple of arguments, or a single argument. None generates a
            short example input.
    Raises:
        ArgumentError: `monitor` is not an open `HeadMonitor` of `max_logit`, the bar is not a
            positive number, or no example input can be guessed.
        UnsupportedError: the logits of a head are unknown, or cannot be scaled by weights of its
            own: behind a norm whose gain all heads share, or by tied or frozen weights.
    Source:
        Kimi Team 2025, "Kimi K2: Open Agentic Intelligence", algorithm 1 (arXiv:2507.20534).

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(8, 2)
        >>> with HeadMonitor(layer, every=1, statistics=["max_logit"]) as monitor:
        ...     clip = QKClip(monitor, max_logit=1e-3)
        ...     out = layer(torch.randn(1, 5, 8), causal=True)
        ...     scalars = monitor.step()
        ...     report = clip.step()
        >>> report.step, report.watched, [str(clipped.head) for clipped in report.heads]
        (1, True, ['L0.H0', 'L0.H1'])
    """

    def __init__(
        self,
        monitor: HeadMonitor,
        max_logit: float = 100.0,
        *,
        reference: Any = None,
    ) -> None:
        self._monitor = _checked(monitor, "QKClip")
        is_number = isinstance(max_logit, int | float | np.number)
        if not is_number or isinstance(max_logit, bool) or not 0 < max_logit < math.inf:
            raise ArgumentError(
                f"QKClip: max_logit={max_logit!r}. Give a number above 0, 100 for example."
            )
        self.max_logit = float(max_logit)
        check_weights("QKClip", monitor.model)
        batch = first_batch(monitor.model, reference, "QKClip")
        self._rows = find_logit_rows(monitor.model, batch, monitor.layers)
        self._steps = monitor.steps
        self._n_watched = 0

    def step(self) -> ClipReport:
        """Clip the heads whose logits passed the bar in the step that the monitor has just ended.

        Every rank calls it; it communicates nothing. All weights are scaled, or none if an
        exception is raised.

        Raises:
            ArgumentError: the monitor is closed, or `monitor.step()` was not called since.
            UnsupportedError: a largest logit is not a number, or the heads are not those that
                were found when the clip was made.
        """
        monitor = _checked(self._monitor, "QKClip.step")
        if monitor.steps == self._steps:
            raise ArgumentError(
                f"QKClip.step: the monitor is still at step {monitor.steps}. Call monitor.step() "
                f"after optimizer.step(), then clip.step()."
            )
        statistics = monitor.latest
        heads: tuple[ClippedHead, ...] = ()
        if statistics is not None:
            heads = self._clip(self._logits(statistics))
            self._n_watched += 1
        self._steps = monitor.steps
        return ClipReport(monitor.steps, statistics is not None, heads)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `transformers.Trainer` after an optimizer step."""
        self.step()

    def __repr__(self) -> str:
        return (
            f"<QKClip of {type(self._monitor.model).__name__}: max_logit={self.max_logit:g}, "
            f"steps={self._steps}, watched={self._n_watched}>"
        )

    def _clip(self, logits: Mapping[Site, Float64[np.ndarray, " H"]]) -> tuple[ClippedHead, ...]:
        """The heads that passed the bar, after their weights were scaled."""
        factors: dict[str, Float64[np.ndarray, " H"]] = {}
        heads: list[ClippedHead] = []
        for site, largest in logits.items():
            low = self.max_logit * (1 - self._margin(self._rows[site.name]))
            needed = np.divide(
                low, largest, out=np.ones_like(largest), where=largest > self.max_logit
            )
            factors[site.name] = np.minimum(factors.get(site.name, 1.0), needed)
            heads += [
                ClippedHead(*clipped)
                for clipped in zip(site.heads(), largest.tolist(), needed.tolist(), strict=True)
                if clipped[1] > self.max_logit
            ]
        if not heads:
            return ()
        changes = (
            part
            for site_name, factor in factors.items()
            for part in self._rows[site_name].scaled(torch.from_numpy(factor))
        )
        scale_rows(self._monitor.model, changes)
        return tuple(heads)

    def _logits(self, statistics: StepStatistics) -> dict[Site, Float64[np.ndarray, " H"]]:
        """The largest logits of the heads of each site, before any softcap."""
        values, is_defined = statistics.values["max_logit"], statistics.defined["max_logit"]
        logits: dict[Site, Float64[np.ndarray, " H"]] = {}
        start = 0
        for site in statistics.sites:
            part = slice(start, start := start + site.n_heads)
            rows = self._rows.get(site.name)
            if rows is None or len(rows.groups) != site.n_heads:
                found = "none" if rows is None else str(len(rows.groups))
                raise UnsupportedError(
                    f"QKClip.step: {site} has {site.n_heads} heads, where {found} were "
                    f"found when the clip was made. Make it with a reference that reaches all "
                    f"layers, after the last change of the model."
                )
            for head, value, known in zip(
                site.heads(), values[part], is_defined[part], strict=True
            ):
                if not known or math.isnan(value) or value == math.inf:
                    raise UnsupportedError(
                        f"QKClip.step: the largest logit of {head} ({site}) is "
                        f"{float(value) if known else 'unknown'}. Nothing was scaled. Go back to "
                        f"a checkpoint with finite logits, or leave the layer out with "
                        f"HeadMonitor(layers=...)."
                    )
            # The cap hides how large a logit was, as far as float32 tells them apart.
            cap = rows.softcap
            ends = -1 + _EPS, 1 - _EPS
            uncapped = values[part] if cap is None else np.clip(values[part] / cap, *ends)
            logits[site] = uncapped if cap is None else cap * np.arctanh(uncapped)
        return logits

    def _margin(self, rows: LogitRows) -> float:
        """The share below the bar that logits are scaled to, as rounding may raise them again."""
        weights = [self._monitor.model.get_parameter(part.parameter) for part in rows.rows]
        dtypes = {weight.dtype for weight in weights}
        dtypes |= {
            torch.get_autocast_dtype(kind)
            for kind in {weight.device.type for weight in weights}
            if torch.is_autocast_enabled(kind)
        }
        return max([_LEAST_MARGIN, *(torch.finfo(dtype).eps for dtype in dtypes)])


def _checked(monitor: Any, caller: str) -> HeadMonitor:
    if not isinstance(monitor, HeadMonitor):
        raise ArgumentError(
            f"{caller}: monitor is {type_of(monitor)}. Give a headwise.HeadMonitor."
        )
    if monitor.is_closed:
        raise ArgumentError(f"{caller}: the monitor is closed. Make a new one, and a new clip.")
    if "max_logit" not in monitor.statistics:
        raise ArgumentError(
            f"{caller}: the monitor watches {', '.join(monitor.statistics)}, not max_logit. Make "
            f"it with statistics={(*monitor.statistics, 'max_logit')}."
        )
    return monitor
