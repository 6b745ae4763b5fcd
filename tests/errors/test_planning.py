"""Impossible plans are refused with the request."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.errors import ArgumentError, HeadError, HeadwiseError, InputError
from headwise.surgery import Costs, LayerPlan, Plan, plan
from headwise.tables import Head, Scores

HEADS = tuple(Head("", layer, head) for layer in range(2) for head in range(4))
SCORES = Scores(HEADS, np.tile(np.arange(4), 2), np.arange(8.0)[None], model="abc")
EACH = {"parameters": np.ones(8)}


def _costs(model: str = "abc") -> Costs:
    return Costs(HEADS, SCORES.kv_heads, EACH, {"parameters": np.zeros(8)}, model)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, ArgumentError, "remove=None, heads=None, budget=None. Give exactly one"),
        ({"remove": 0.3, "heads": "L0.H1"}, ArgumentError, "remove=0.3, heads=L0.H1"),
        ({"remove": 1.0}, ArgumentError, r"remove=1\.0\. Give a share"),
        ({"remove": 3}, ArgumentError, r"remove=3\. Give a share"),
        ({"remove": ["L0.H1"]}, ArgumentError, r"remove=\['L0.H1'\].*to name heads, give heads="),
        ({"remove": "0.3"}, ArgumentError, "remove='0.3'. Give a share"),
        ({"remove": 0.1}, ArgumentError, r"remove=0\.1 of 8 heads removes none.*is 1 head\b"),
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
            "'watts' is not one of parameters",
        ),
        (
            {"budget": {"parameters": 1}, "costs": _costs()},
            ArgumentError,
            "1 parameters cannot be reached. The lowest possible is parameters 2",
        ),
        (
            {"budget": {"parameters": 8}, "costs": _costs()},
            ArgumentError,
            "all heads together fit into 8 parameters",
        ),
        ({"budget": 4, "costs": _costs()}, ArgumentError, "budget=4. Give numbers by name"),
        ({"budget": {}, "costs": _costs()}, ArgumentError, r"budget=\{\}. Give numbers by name"),
        (
            {"remove": 0.5, "costs": _costs("other")},
            ArgumentError,
            "costs are of the model 'other'",
        ),
        ({"heads": "L0.H1", "uniform": True}, ArgumentError, "uniform=True, .* leave 3, 4 in the"),
    ],
)
def test_impossible_plans(options: dict[str, Any], kind: type[HeadwiseError], message: str) -> None:
    with pytest.raises(kind, match=message):
        plan(SCORES, **options)


def test_heads_without_scores_are_not_planned() -> None:
    with pytest.raises(ArgumentError, match=r"scores are a dict\. Give the result of"):
        plan({"L0.H1": 0.3}, remove=0.3)  # type: ignore[arg-type]


def test_a_layer_named_twice() -> None:
    with pytest.raises(HeadError, match="layer 3 of encoder is listed twice"):
        Plan((LayerPlan("encoder", 3, 4, (1,)), LayerPlan("encoder", 3, 4, (2,))))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "holds no object"),
        ('{"format": "headwise-costs/9"}', "its format is 'headwise-costs/9'"),
        ('{"format": "headwise-costs/1"}', "'heads'"),
    ],
)
def test_a_file_without_costs(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content, "utf-8")
    with pytest.raises(InputError, match=f"costs.json holds no costs .*{message}"):
        Costs.load(path)


def test_costs_of_too_few_heads(tmp_path: Path) -> None:
    path = _costs().save(tmp_path / "costs.json")
    content = json.loads(path.read_text("utf-8"))
    content["kv_heads"].pop()
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(InputError, match="7 numbers for 8 heads"):
        Costs.load(path)
