"""The table of models of the results: complete, and true of a few of them in every run."""

import re
from pathlib import Path

import pytest
from architectures import CASES, SAMPLE
from architectures.trial import STEPS, try_out

from tiers import tiers

pytestmark = pytest.mark.usefixtures("fresh")

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "models.md"
# One of each way: all steps, a layer that attends twice, no plain projection, a norm over heads.
_FEW = ("Llama", "NystromformerModel", "OlmoeForCausalLM", "SwinModel")
# A configuration without a name, and a projection that several calls share.
_MORE = ("BarkCausalModel", "ProphetNetForConditionalGeneration")


def _rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: results for name, *results in cells if name in CASES}


def test_every_architecture_is_in_the_table() -> None:
    rows = _rows()
    assert rows.keys() == CASES.keys()
    assert len(rows) >= 200
    page = PAGE.read_text("utf-8")
    reasons = {int(number) for number in re.findall(r"^(\d+)\. \S", page, re.MULTILINE)}
    for name, results in rows.items():
        for result in results:
            number = re.fullmatch(r"\[(\d+)\]\(#reasons\)", result)
            assert result in ("✓", "") or (number and int(number[1]) in reasons), name


@pytest.mark.parametrize("name", tiers(_FEW, (*_MORE, *SAMPLE)))
def test_the_table_is_true(name: str) -> None:
    trial = try_out(CASES[name])
    assert not trial.broken
    expected = dict(zip(STEPS, _rows()[name], strict=True))
    assert {step: "" for step in expected if not expected[step]} == {
        step: "" for step in STEPS if step not in trial.results
    }
    works = {step for step, message in trial.results.items() if not message}
    assert works == {step for step, cell in expected.items() if cell == "✓"}
