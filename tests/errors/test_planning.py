"""Plans that cannot be made are refused with what was asked for."""

from typing import Any

import numpy as np
import pytest

from headwise.errors import ArgumentError, HeadError, HeadwiseError
from headwise.heads import Head
from headwise.scores import Scores
from headwise.surgery import Costs, plan

HEADS = tuple(Head("", layer, head) for layer in range(2) for head in range(4))
SCORES = Scores(HEADS, np.tile(np.arange(4), 2), np.arange(8.0)[None], model="abc")
EACH = {"parameters": np.ones(8)}


def _costs(model: str = "abc") -> Costs:
    return Costs(HEADS, SCORES.kv_heads, EACH, {"parameters": np.zeros(8)}, model)


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ({}, ArgumentError, "remove=None, heads=None, budget=None. Give exactly one"),
        ({"remove": 0.3, "heads": "L0.H1"}, ArgumentError, "remove=0.3, heads=L0.H1"),
        ({"remove": 1.0}, ArgumentError, r"remove=1\.0\. Give a share"),
        ({"remove": 3}, ArgumentError, r"remove=3\. Give a share"),
        ({"remove": 0.1}, ArgumentError, r"remove=0\.1 of 8 heads removes none.*is 1 heads"),
        ({"remove": 0.9}, ArgumentError, r"remove=0\.9 of 8 heads would empty.*6 heads at most"),
        ({"remove": 0.2, "uniform": True}, ArgumentError, "removes none.*is 2 heads"),
        ({"heads": "L2.H0"}, HeadError, r"no head L2\.H0"),
        ({"heads": {1: [0, 1, 2, 3]}}, HeadError, r"L1\.H3 is the last head of its layer"),
        ({"budget": {"parameters": 4}}, ArgumentError, "a budget without costs"),
        (
            {"budget": {"parameters": 4}, "costs": _costs("other")},
            ArgumentError,
            "costs are of the model 'other'.*scores of 'abc'",
        ),
        (
            {"budget": {"watts": 4}, "costs": _costs()},
            ArgumentError,
            "'watts' is none of parameters",
        ),
        (
            {"budget": {"parameters": 1}, "costs": _costs()},
            ArgumentError,
            "1 parameters cannot be reached. The least is parameters 2",
        ),
        (
            {"budget": {"parameters": 8}, "costs": _costs()},
            ArgumentError,
            "8 parameters is kept with all heads",
        ),
    ],
)
def test_what_cannot_be_planned(how: dict[str, Any], kind: type[HeadwiseError], told: str) -> None:
    with pytest.raises(kind, match=told):
        plan(SCORES, **how)
