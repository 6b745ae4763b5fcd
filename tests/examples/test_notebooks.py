"""The notebooks of the documentation run from the first cell to the last."""

import sys
from pathlib import Path

import nbformat
import pytest

from house.source import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_is_a_notebook_for_each_path_and_a_quick_start() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["learn", "quick-start", "research", "shrink"]


@each_notebook
def test_a_notebook_is_light(path: Path) -> None:
    """Outputs are made when the site is built, so that none of them is out of date."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert not [
        cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")
    ]


@pytest.mark.full
@each_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    notebooks = pytest.importorskip("notebooks")
    try:
        done = notebooks.run_notebook(path, tmp_path)
    finally:
        sys.modules.pop("notebooks", None)
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert any(cell.outputs for cell in code)
