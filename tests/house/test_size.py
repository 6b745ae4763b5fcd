"""The house has a budget: the table of rooms in docs/architecture.md is read, and kept."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from house.source import PACKAGE, ROOT, Source, sources

ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \|$", re.MULTILINE)
TABLE = dict(ROW.findall((ROOT / "docs" / "architecture.md").read_text("utf-8")))
BUDGET = {name: int(most.replace(",", "")) for name, most in TABLE.items()}


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def _rooms() -> Iterator[str]:
    for path in PACKAGE.iterdir():
        if (path / "__init__.py").exists():
            yield f"{path.name}/"


def _files_of(name: str) -> list[Path]:
    if name == "other files":
        return sorted(PACKAGE.glob("*.py"))
    folder = {"src": PACKAGE, "tests": ROOT / "tests", "benchmarks": ROOT / "benchmarks"}
    return sorted(folder.get(name, PACKAGE / name).rglob("*.py"))


def _classes(source: Source) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(source.tree))


def test_every_room_has_a_ceiling() -> None:
    assert {*_rooms(), "other files", "src", "tests", "benchmarks", "classes", "files"} == {*BUDGET}


@pytest.mark.parametrize("name", sorted(set(BUDGET) - {"classes", "files"}))
def test_lines_of_python_are_within_the_budget(name: str) -> None:
    assert _lines(_files_of(name)) <= BUDGET[name], "raise the table only for what earns its room"


def test_classes_and_files_are_within_the_budget() -> None:
    assert sum(map(_classes, sources())) <= BUDGET["classes"]
    assert len([*sources()]) <= BUDGET["files"]
