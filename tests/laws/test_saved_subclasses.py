"""A subclass of a result loads as itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.caching import CachePlan
from headwise.surgery import Costs, LayerPlan, Plan
from small_files import HEADS, SCORES
from studies import make_roles, make_study

EACH = {"parameters": np.ones(3)}
RESULTS: dict[str, Callable[[], Any]] = {
    "table.json": lambda: make_study(layers=1, heads=2).table,
    "roles.json": lambda: make_roles(make_study(layers=1, heads=2)),
    "scores.json": lambda: SCORES,
    "plan.json": lambda: Plan((LayerPlan("", 0, 3, (1,)),), "abc", "a reason"),
    "costs.json": lambda: Costs(HEADS, SCORES.kv_heads, EACH, EACH, "abc", {}),
    "cache.json": lambda: CachePlan.of({1: [0]}, n_layers=2, n_kv_heads=2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_subclass_loads_as_itself(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]()
    path = result.save(tmp_path / name)
    subclass = type("Extended", (type(result),), {})
    loaded = subclass.load(path)
    assert type(loaded) is subclass
    loaded.save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == path.read_bytes()
