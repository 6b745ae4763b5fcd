"""`make bench`: its steps exist and write what they say; measured blocks name their processor."""

import ast
import importlib
import importlib.util
import os
import re
import time
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import bench
from house.source import ROOT

PROCESSOR = re.compile(r"AMD|Intel|NVIDIA")
BENCHMARKS = ROOT / "benchmarks"
SHARED = "benchmarks/_report.py"  # has the options of several
Block = tuple[str, str]  # page, part

# Blocks that measure no time: counts, losses, roles, memory.
WITHOUT_TIME: set[Block] = {
    ("benchmarks/results/comparing.md", ""),
    ("benchmarks/results/head-files.md", "retrieval"),
    ("benchmarks/results/models.md", ""),
    ("benchmarks/results/models.md", "other libraries"),
    ("benchmarks/results/nothing-lost.md", "broken files"),
    ("benchmarks/results/nothing-lost.md", "kills"),
    ("benchmarks/results/nothing-lost.md", "soak"),
    *(("benchmarks/results/pruning.md", part) for part in (
        "agreement", "attractors", "babyllama", "minigpt", "minilm", "paragraphs", "treebank"
    )),
    ("benchmarks/results/real-models.md", "rxnmapper"),
    ("benchmarks/results/real-models-whisper.md", "whisper"),
    ("benchmarks/results/reproductions.md", "clark"),
    ("benchmarks/results/reproductions.md", "michel"),
    ("benchmarks/results/roles.md", ""),
    ("benchmarks/results/roles.md", "encoder"),
    *(("benchmarks/results/uncertainty.md", part) for part in (
        "intervals", "simulate-tasks",
        "corpora", "elbows", "lengths", "simulate"
    )),
}  # fmt: skip
# Blocks of times that no step writes, and what their command needs beyond the checkout.
BY_HAND: dict[Block, str] = {
    ("benchmarks/results/formats.md", ""): "needs an environment with llama.cpp",
    ("benchmarks/results/reading-the-page.md", ""): "Chromium",
    ("benchmarks/results/real-models-gemma.md", "gemma"): "texts that are not part of the project",
    ("benchmarks/results/rivals.md", "torch-pruning"): "make rivals",
    ("benchmarks/results/shrink.md", ""): "models and texts that are not part of the project",
    ("benchmarks/results/smaller.md", ""): "a model that is not part of the project",
    ("benchmarks/results/triton.md", ""): "a GPU",
    ("benchmarks/results/vllm.md", ""): "make vllm",
}


def _blocks() -> dict[Block, str]:
    """The text of every measured block of the documents and the results."""
    blocks = {}
    folders = (ROOT / "docs", ROOT / "benchmarks" / "results")
    for path in sorted(path for folder in folders for path in folder.rglob("*.md")):
        pattern = r"<!-- measured(?:: ([^>]*))? -->(.*?)<!-- end of what was measured -->"
        for part, text in re.findall(pattern, path.read_text("utf-8"), re.DOTALL):
            blocks[path.relative_to(ROOT).as_posix(), part] = text
    return blocks


BLOCKS = _blocks()


def test_measured_blocks_name_the_processor_unless_they_measure_no_time() -> None:
    assert len(BLOCKS) > 40
    assert {key for key, text in BLOCKS.items() if not PROCESSOR.search(text)} == WITHOUT_TIME


@pytest.mark.parametrize("step", bench.STEPS, ids=lambda step: step.name)
def test_a_step_exists_and_its_page_has_what_it_writes(step) -> None:  # type: ignore[no-untyped-def]
    source = "".join((ROOT / name).read_text("utf-8") for name in (step.script, SHARED))
    assert step.minutes > 0
    for option in re.findall(r"--[a-z-]+", step.command):
        assert f'"{option}"' in source, f"{step.script} has no {option}"
    for block in step.blocks if step.page else ():
        assert (step.page, block) in BLOCKS, f"{step.page} has no block {block!r}"
        assert not block or f'"{block}"' in source + step.command
    if step.figure:
        assert (ROOT / step.figure).is_file()
        assert f"]({Path(step.figure).name})" in (ROOT / step.page).read_text("utf-8")
    # What it reads, earlier steps write.
    earlier = bench.STEPS[: bench.STEPS.index(step)]
    assert all(any(f"--json {path}" in other.command for other in earlier) for path in step.reads)


def test_every_block_of_times_is_written_by_a_step_or_by_hand() -> None:
    written = {(step.page, block) for step in bench.STEPS if step.page for block in step.blocks}
    assert written & BY_HAND.keys() == set()
    assert written | BY_HAND.keys() | WITHOUT_TIME == BLOCKS.keys()


def test_a_benchmark_imports_only_what_exists() -> None:
    """A name that has moved would be noticed only when the benchmark is run next, by hand."""
    parsed = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in BENCHMARKS.rglob("*.py")
    }
    imported = 0
    for name, tree in parsed.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            names = {alias.name for alias in node.names}
            if node.module in parsed:
                names -= _names_of(parsed[node.module])
            elif node.module.startswith("headwise"):
                module = importlib.import_module(node.module)
                names = {x for x in names if not hasattr(module, x) and not _is_file(module, x)}
            else:
                continue
            assert not names, f"{name}: {node.module} has no {sorted(names)}"
            imported += 1
    assert imported > 150


def _is_file(package: ModuleType, name: str) -> bool:
    return importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def _names_of(tree: ast.Module) -> set[str]:
    """What a file defines or imports."""
    nodes = list(ast.walk(tree))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {getattr(node, "name", "") for node in nodes}


def test_names_of_steps_are_different() -> None:
    assert len({step.name for step in bench.STEPS}) == len(bench.STEPS)


def test_a_run_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps; the second reads rows of the first, and fails while a file is missing."""
    (tmp_path / "benchmarks").mkdir()
    for name, code in {
        "first.py": "open('first.json', 'w').write('1'); open('runs', 'a').write('1')",
        "second.py": "open('allowed'); open('runs', 'a').write('2')",
        "third.py": "import os; open('runs', 'a').write('3' + os.environ['OMP_NUM_THREADS'])",
    }.items():
        (tmp_path / "benchmarks" / name).write_text(code)
    listed = (
        bench.Step("first", 1, "first --json first.json"),
        bench.Step("second", 2, "second {page}", "docs/a.md", reads=("first.json",)),
        bench.Step("third", 3, "third", "docs/b.md", threads=1),
    )
    monkeypatch.setattr(bench, "STEPS", listed)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    assert (bench.main([]), runs.read_text()) == (1, "131")
    (tmp_path / "allowed").touch()
    assert (bench.main(["docs/a.md"]), runs.read_text()) == (0, "1312")
    assert (bench.main([]), runs.read_text()) == (0, "1312")  # nothing is left
    later = time.time() + 10
    os.utime(tmp_path / "first.json", (later, later))  # rows that are newer than their page
    assert (bench.main([]), runs.read_text()) == (0, "13122")
    (tmp_path / "benchmarks/first.py").write_text("raise SystemExit(2)")
    (tmp_path / "build/bench/first.done").unlink()
    assert (bench.main([]), runs.read_text()) == (1, "13122")  # not with the rows of an earlier run
