"""The page about roles: what its script makes of tables, and a page that has the same ones."""

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from headwise.roles import Roles
from studies import make_roles, make_study

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "roles.md"


@pytest.fixture(scope="module")
def script():
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("benchmark_roles", folder / "roles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(folder))


def made(script, found: Sequence[int]) -> Roles:
    """Roles as the script finds them, of which some heads have each."""
    study = make_study(2, 2)
    roles = [role + part for role in script.ASKED[:2] for part in ("", *script.PARTS)]
    tables = [make_roles(study, found, role) for role in (*roles, *script.ASKED[2:])]
    rows = pd.concat([one.frame() for one in tables], ignore_index=True)
    return replace(tables[0], rows=rows)


@pytest.fixture(scope="module")
def told(script, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script tells of tables that were kept."""
    place = tmp_path_factory.mktemp("roles")
    page, run = place / "page.md", place / "seed-3"
    page.write_text("before\n<!-- measured -->\n<!-- end of what was measured -->\nafter", "utf-8")
    made(script, (0, 1)).save(place / "encoder.json")
    made(script, (0,)).save(place / "encoder-A.json")
    made(script, (0, 2)).save(place / "encoder-B.json")
    run.mkdir()
    made(script, ()).save(run / "roles.json")
    seen = {"conjugation": 0.5, "translation": 0.25}
    (run / "judged.json").write_text(json.dumps({"seen": seen, "copying": 0.75}), "utf-8")
    numbers = ("accuracy", "ci_low", "ci_high", "aer", "chance", "offset", "diagonal")
    aligned = [
        {"name": "L0.H0", "query": query, "chosen_half": 1.0, **dict.fromkeys(numbers, 0.5)}
        for query in ("identity", "prediction")
    ]
    (run / "alignment.json").write_text(json.dumps(aligned), "utf-8")
    script.main(["tell", "--into", str(page), "--keep", str(place)])
    return page.read_text("utf-8")


def titles(text: str) -> set[str]:
    """The heads of tables, without the number of seeds."""
    rows = re.findall(r"^\| (.*) \|\n\| :?-", text, re.MULTILINE)
    return {re.sub(r"( \| seed \d+)+$", "", row) for row in rows}


def test_the_page_has_the_tables_of_the_script(told: str) -> None:
    assert told.startswith("before\n")
    assert told.endswith("\nafter")
    assert len(titles(told)) == 7
    assert titles(PAGE.read_text("utf-8")) == titles(told)


def test_labels_and_their_stability_are_those_of_the_tables(script, told: str) -> None:
    kinds = len(script.ASKED) + 4
    assert f"4 heads: 2 have {2 * kinds} roles; 2 have none: L1.H0, L1.H1." in told
    assert f"{kinds} of the {2 * kinds} labels that one half or the other gives" in told
    assert f"{kinds} are found on both halves, 0 on one, {kinds} on neither" in told
    # Of four heads one half names 1 and the other 2, both the first: (3/4 − 1/2) / (1 − 1/2).
    assert "Cohen's κ over all heads and roles is 0.50" in told
    assert "| induction | 0 of 1 | – |" in told
    assert "- seed 3: L0.H0, L1.H1 (next subject): without all of them" in told


def test_the_page_names_every_head_once_as_having_roles_or_none() -> None:
    page = PAGE.read_text("utf-8")
    found = re.search(r"(\d+) heads: (\d+) have (\d+) roles; (\d+) have none: (.*)\.", page)
    assert found is not None
    heads, having, roles, none = map(int, found.groups()[:4])
    named = re.findall(r"^\| (L\d+\.H\d+) \| ", page, re.MULTILINE)
    without = re.findall(r"L\d+\.H\d+", found[5])
    assert (heads, len(named), len(set(named)), len(without)) == (72, roles, having, none)
    assert set(named).isdisjoint(without)
