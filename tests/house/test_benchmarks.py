"""`make bench`: its steps exist, their pages have what they write, and imports lead somewhere."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks import bench
from house.source import ROOT

SHARED = "benchmarks/_report.py"  # has the options of several


@pytest.mark.parametrize("step", bench.STEPS, ids=lambda step: step.name)
def test_a_step_exists_and_its_page_has_what_it_writes(step: bench.Step) -> None:
    source = "".join((ROOT / name).read_text("utf-8") for name in (step.script, SHARED))
    for option in re.findall(r"--[a-z-]+", step.command):
        assert f'"{option}"' in source, f"{step.script} has no {option}"
    for block in step.blocks if step.page else ():
        start = f"<!-- measured: {block} -->" if block else "<!-- measured -->"
        assert start in (ROOT / step.page).read_text("utf-8"), f"{step.page} has no {block!r}"
        assert not block or f'"{block}"' in source + step.command
    if step.figure:
        assert (ROOT / step.figure).is_file()
        assert f"]({Path(step.figure).name})" in (ROOT / step.page).read_text("utf-8")
    # What it reads, earlier steps write.
    earlier = bench.STEPS[: bench.STEPS.index(step)]
    assert all(any(f"--json {path}" in other.command for other in earlier) for path in step.reads)


def test_a_benchmark_imports_only_what_exists() -> None:
    """A name that has moved would be noticed only when the benchmark is run next, by hand."""
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in (ROOT / "benchmarks").rglob("*.py")
    }
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            missing = {alias.name for alias in node.names}
            if node.module in trees:
                missing -= _names_of(trees[node.module])
            elif node.module.startswith("headwise"):
                missing -= {*dir(importlib.import_module(node.module))}
                missing = {x for x in missing if not importlib.util.find_spec(f"{node.module}.{x}")}
            else:
                continue
            assert not missing, f"{name}: {node.module} has no {sorted(missing)}"


def _names_of(tree: ast.Module) -> set[str]:
    """What a file defines or imports."""
    nodes = list(ast.walk(tree))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {getattr(node, "name", "") for node in nodes}
