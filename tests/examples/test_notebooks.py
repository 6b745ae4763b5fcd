"""The notebooks of the documentation run, and are stored with what they show."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from folders import write_gguf
from house.source import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_is_a_notebook_for_each_path_and_a_quick_start() -> None:
    names = ["chat-model", "learn", "quick-start", "research", "shrink"]
    assert [path.stem for path in NOTEBOOKS] == names


@each_notebook
def test_a_notebook_is_stored_with_its_outputs(path: Path) -> None:
    """`python website/notebooks.py` runs the notebooks and stores what they show."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    _assert_shown(notebook)
    # What differs from machine to machine (paths, warnings, the version of Python) is left out.
    shown = str([cell.outputs for cell in code])
    assert not re.search(r"site-packages|'stderr'|python3\.\d|(?<![\w/+])/\w+/\w+/", shown)
    assert path.stat().st_size < 32_000


def _assert_shown(notebook: nbformat.NotebookNode) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    silent = [cell.source for cell in code if _shows(cell.source) and not cell.outputs]
    assert not silent, "\n\n".join(silent)


def _shows(source: str) -> bool:
    """Whether a cell prints, draws, or ends with an expression."""
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.Expr) or "print(" in source or ".plot(" in source


@pytest.fixture
def run_notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    yield pytest.importorskip("notebooks").run_notebook
    sys.modules.pop("notebooks", None)


@pytest.mark.full
def test_the_notebook_on_a_chat_model_runs_on_a_tiny_one(run_notebook: Any, tmp_path: Path) -> None:
    """Its file is no part of the environment: `website/notebooks.py --model` runs it by hand."""
    write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    done = run_notebook(NOTEBOOKS[0], tmp_path)
    _assert_shown(done)


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS[1:], ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_stored(
    path: Path, run_notebook: Any, tmp_path: Path
) -> None:
    done = run_notebook(path, tmp_path)
    stored = nbformat.read(path, as_version=4)
    trained = False  # rounding on another machine grows in training, so numbers may differ then
    for cell, old in zip(done.cells, stored.cells, strict=True):
        outputs, before = cell.get("outputs", []), old.get("outputs", [])
        assert [sorted(x.get("data", x)) for x in outputs] == [
            sorted(x.get("data", x)) for x in before
        ], cell.source
        trained = trained or bool(re.search(r"\b(?:train|recover)\(", cell.source))
        assert trained or [_text(x) for x in outputs] == [_text(x) for x in before], cell.source


def _text(output: nbformat.NotebookNode) -> str:
    return str(output.get("text", output.get("data", {}).get("text/plain")))
