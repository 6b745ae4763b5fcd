"""Checks of what a clip is given: its monitor, its bar, and the logits."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Site
from headwise.monitor._monitor import HeadMonitor


def check_numbers(
    site: Site, values: Float64[np.ndarray, " H"], is_defined: Bool[np.ndarray, " H"]
) -> None:
    for head, value, defined in zip(site.heads(), values, is_defined, strict=True):
        if not defined or math.isnan(value) or value == math.inf:
            raise UnsupportedError(
                f"QKClip.step: the largest logit of {head} ({site.name}) is "
                f"{float(value) if defined else 'unknown'}. Nothing was scaled. Go back to a "
                f"checkpoint with finite logits, or leave the layer out with "
                f"HeadMonitor(layers=...)."
            )


def checked_monitor(monitor: Any, caller: str = "QKClip") -> HeadMonitor:
    if not isinstance(monitor, HeadMonitor):
        raise ArgumentError(
            f"{caller}: monitor is a {type(monitor).__name__}. Give a headwise.HeadMonitor."
        )
    if monitor.is_closed:
        raise ArgumentError(f"{caller}: the monitor is closed. Make a new one, and a new clip.")
    if "max_logit" not in monitor.statistics:
        raise ArgumentError(
            f"{caller}: the monitor watches {', '.join(monitor.statistics)}, not max_logit. Make "
            f"it with statistics={(*monitor.statistics, 'max_logit')}."
        )
    return monitor


def checked_bar(max_logit: Any) -> float:
    is_number = isinstance(max_logit, int | float | np.number) and not isinstance(max_logit, bool)
    if not is_number or not 0 < max_logit < math.inf:
        raise ArgumentError(
            f"QKClip: max_logit={max_logit!r}. Give a number above 0, 100 for example."
        )
    return float(max_logit)
