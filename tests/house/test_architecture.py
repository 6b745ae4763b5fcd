"""The traces in `docs/architecture.md` name files and definitions that exist."""

import ast
import re
from pathlib import Path

from house.source import PACKAGE, ROOT
from house.test_floors import FLOOR

TEXT = " ".join((ROOT / "docs" / "architecture.md").read_text("utf-8").split())
# `file.py`, or `file.py: name`, or `file.py: Class.name`
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", TEXT)))
PLACEHOLDER = "NAME"


def test_every_file_and_definition_of_the_traces_exists() -> None:
    for path, name in NAMED:
        if PLACEHOLDER not in path:
            files = [file for file in _files() if f"/{file.as_posix()}".endswith(f"/{path}")]
            assert files, f"{path} is no file"
            names = {part for part in name.split(".") if part}
            assert any(names <= _defined(file) for file in files), f"{path} has no {name}"


def test_the_floors_are_those_of_the_rule() -> None:
    """The table has every part of the package, on the floor from which it may import."""
    table, floor = {}, 0
    for line in (ROOT / "docs" / "architecture.md").read_text("utf-8").splitlines():
        row = re.match(r"\| (\d*) ?\| (`[^|]*) \|", line)
        if row and (row[1] or table):
            floor = int(row[1] or floor)
            parts = re.findall(r"`(\w+)(?:\.py|/)`", row[2])
            table |= dict.fromkeys(parts, floor)
    assert table == {part: floor for part, floor in FLOOR.items() if not part.startswith("__")}


def _files() -> list[Path]:
    roots = (PACKAGE, ROOT / "tests", ROOT / "benchmarks")
    return [path for root in roots for path in root.rglob("*.py")]


def _defined(path: Path) -> set[str]:
    """The classes and functions of a file, those of classes included."""
    kinds = ast.ClassDef | ast.FunctionDef
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, kinds)
    }
