"""In which tier each case of a test runs: in every run, in the long tier, or by hand alone."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

LONG = (pytest.mark.full,)
BY_HAND = (pytest.mark.full, pytest.mark.zoo)  # `make zoo` runs them, CI does not


def diagonal(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every value of each axis occurs, where all of their product takes longer."""
    values = [[*axis] for axis in axes]
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]


def tiers(quick: Iterable[Any], long: Iterable[Any] = (), by_hand: Iterable[Any] = ()) -> list[Any]:
    """Each case once, in the first of these tiers that has it.

    Give what is by hand a sample in the tiers before it: one case of each kind.
    """
    marks: dict[Any, tuple[Any, ...]] = {}
    for cases, those in ((quick, ()), (long, LONG), (by_hand, BY_HAND)):
        for case in cases:
            marks.setdefault(case, those)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=those)
        for case, those in marks.items()
    ]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Every value of each axis in every run, and all of their product in the long tier."""
    values = [[*axis] for axis in axes]
    return tiers(diagonal(*values), product(*values))
