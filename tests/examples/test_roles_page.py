"""The page about roles has the tables that its script writes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.evidence import roles as script
from headwise.roles import Roles
from headwise.roles.scores import RULES
from studies import make_roles, make_study

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "roles.md"


def make_tables(heads: Sequence[int]) -> Roles:
    """Roles as the script computes them; the numbered heads have every role."""
    study = make_study(2, 2)
    names = [role + part for role in script.ROLES[:2] for part in ("", *script.PARTS)]
    tables = [make_roles(study, heads, role) for role in (*names, *script.ROLES[2:])]
    rows = pd.concat([roles.frame() for roles in tables], ignore_index=True)
    meanings = {role: text for roles in tables for role, text in roles.meanings.items()}
    return replace(tables[0], rows=rows, meanings=meanings)


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page that the script writes from saved tables."""
    place = tmp_path_factory.mktemp("roles")
    page, run = place / "page.md", place / "seed-3"
    page.write_text("before\n<!-- measured -->\n<!-- end of what was measured -->\nafter", "utf-8")
    make_tables((0, 1)).save(place / "MiniLM-trees.json")
    make_tables((0,)).save(place / "MiniLM-trees-A.json")
    make_tables((0, 2)).save(place / "MiniLM-trees-B.json")
    choices = make_tables((2,))
    rules = dict.fromkeys((f"rule.{rule}" for rule in RULES), 0.25)
    replace(choices, rows=choices.rows.assign(**rules)).save(place / "MiniLM-coref.json")
    run.mkdir()
    make_tables(()).save(run / "roles.json")
    accuracy = {"conjugation": 0.5, "translation": 0.25}
    (run / "judged.json").write_text(json.dumps({"seen": accuracy, "copying": 0.75}), "utf-8")
    script.main(["publish", "--into", str(page), "--keep", str(place)])
    return page.read_text("utf-8")


def titles(text: str) -> set[str]:
    """The heads of tables, without the number of seeds."""
    rows = re.findall(r"^\| (.*) \|\n\| :?-", text, re.MULTILINE)
    return {re.sub(r"( \| seed \d+)+$", "", row) for row in rows}


def test_the_page_has_the_tables_of_the_script(page_text: str) -> None:
    assert page_text.startswith("before\n")
    assert page_text.endswith("\nafter")
    assert len(titles(page_text)) == 8
    # The committed page may have been made without halves.
    stable = {title for title in titles(page_text) if "half A" not in title}
    of_others = r"<!-- measured: encoder -->.*?<!-- end of what was measured -->"
    committed = titles(re.sub(of_others, "", PAGE.read_text("utf-8"), flags=re.DOTALL))
    assert stable <= committed <= titles(page_text)


def test_every_role_has_an_outcome_on_the_page(page_text: str) -> None:
    kinds = len(script.ROLES) + 4
    rows = re.findall(r"^\| (.+?) \| (found \(\d\)|not found|not tested) \| L", page_text, re.M)
    assert len(rows) == 2 * kinds
    assert {outcome for _, outcome in rows} == {"found (2)", "found (1)"}
    assert "## MiniLM on GAP" in page_text


def test_labels_and_their_stability_are_those_of_the_tables(page_text: str) -> None:
    kinds = len(script.ROLES) + 4
    assert f"4 heads: 2 have {2 * kinds} roles; 2 have none: L1.H0, L1.H1." in page_text
    assert f"{kinds} of the {2 * kinds} labels found on either half" in page_text
    assert f"{kinds} are found on both halves, 0 on one, {kinds} on neither" in page_text
    # Of 4 heads one half labels 1 and the other 2, both the first: (3/4 − 1/2) / (1 − 1/2).
    assert "Cohen's κ over all heads and roles is 0.50" in page_text
    assert "| prefix matching | 0 of 1 | not found |" in page_text
    assert "- seed 3: L0.H0, L1.H1 (next subject): ablating all of them" in page_text
