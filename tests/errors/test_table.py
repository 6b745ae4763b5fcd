"""What a table refuses, by name and value."""

import numpy as np
import pytest

from headwise.errors import ArgumentError
from headwise.tables import Head, HeadTable, Totals


def _table(keep: bool) -> HeadTable:
    totals = Totals.of_texts(np.ones((3, 1)), np.ones((3, 1)), np.array([1.0]), keep=keep)
    return HeadTable((Head("", 0, 0),), np.array([0]), {"entropy": totals})


def test_sums_of_texts_must_have_been_kept() -> None:
    with pytest.raises(ArgumentError, match=r"'entropy' in each text.*per_text=True"):
        _table(keep=False).interval("entropy")


@pytest.mark.parametrize("options", [{"level": 95.0}, {"level": 0.0}, {"draws": 0}])
def test_an_interval_needs_a_level_and_draws(options: dict[str, float]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ArgumentError, match=f"interval.*{name}={value}"):
        _table(keep=True).interval("entropy", **options)


def test_tables_with_and_without_texts_do_not_add() -> None:
    with pytest.raises(ArgumentError, match="only one of the two has per_text"):
        _table(keep=True) + _table(keep=False)
