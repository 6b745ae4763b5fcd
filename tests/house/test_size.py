"""The house has a budget: the table in docs/architecture.md is read, and kept."""

import ast
import re

from house.source import PACKAGE, ROOT, sources

ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \|$", re.MULTILINE)
TABLE = dict(ROW.findall((ROOT / "docs" / "architecture.md").read_text("utf-8")))
FOLDERS = {"src": PACKAGE, "tests": ROOT / "tests", "benchmarks": ROOT / "benchmarks"}


def test_lines_classes_and_files_are_within_the_budget() -> None:
    sizes = {
        name: sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))
        for name, folder in FOLDERS.items()
    }
    nodes = [node for source in sources() for node in ast.walk(source.tree)]
    sizes["classes"] = sum(isinstance(node, ast.ClassDef) for node in nodes)
    sizes["files"] = len(sources())
    budget = {name: int(most.replace(",", "")) for name, most in TABLE.items()}
    assert sizes.keys() == budget.keys()
    over = {name: size for name, size in sizes.items() if size > budget[name]}
    assert not over, "raise the table only for what earns its room"
