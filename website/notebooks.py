"""Notebooks of the documentation: run them, and write each as a page with its output."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

SECONDS = 1200  # of a cell, on a busy machine


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook from its first cell to its last, in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources).execute()
    return notebook


def notebook_page(path: Path, into: Path, folder: Path) -> None:
    """Run a notebook and write it into a folder as Markdown, with its pictures beside it."""
    into.mkdir(parents=True, exist_ok=True)
    cells = run_notebook(path, folder).cells
    parts = [cells[0].source, f"[Download this notebook]({path.name})"]
    for number, cell in enumerate(cells[1:], 1):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for index, output in enumerate(cell.outputs):
            parts += _shown(output, into, f"{path.stem}-{number}-{index}.png")
    (into / f"{path.stem}.md").write_text("\n\n".join(parts) + "\n", "utf-8")
    (into / path.name).write_bytes(path.read_bytes())


def _shown(output: Any, into: Path, picture: str) -> Iterator[str]:
    """One output as Markdown: a picture, a table, or text; nothing for progress and warnings."""
    data = output.get("data", {})
    if "image/png" in data:
        (into / picture).write_bytes(base64.b64decode(data["image/png"]))
        yield f"![Output of the cell above]({picture})"
    elif "text/html" in data:
        yield re.sub(r"<style.*?</style>|\n\s*", "", data["text/html"], flags=re.DOTALL)
    elif "text/plain" in data or output.get("name") == "stdout":
        yield f"```text\n{data.get('text/plain', output.get('text', '')).rstrip()}\n```"
