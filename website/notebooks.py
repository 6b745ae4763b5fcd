"""Notebooks of the documentation: run them, and write each as a page with its output."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

SECONDS = 300  # for one cell


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook from its first cell to its last in a folder of its own.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}
    )
    # The kernel starts without the reader's settings, and without frozen-module warnings.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    client.execute()
    return notebook


def notebook_page(path: Path, into: Path, folder: Path) -> None:
    """Run a notebook and write it into a folder as Markdown, with its pictures beside it."""
    exporter = MarkdownExporter()
    files = {"output_files_dir": f"{path.stem}_files"}
    text, resources = exporter.from_notebook_node(run_notebook(path, folder), resources=files)
    into.mkdir(parents=True, exist_ok=True)
    for name, data in resources["outputs"].items():
        picture = into / name
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(data)
    download = f"[Download this notebook]({path.name})\n\n"
    title, _, rest = text.lstrip().partition("\n")
    (into / f"{path.stem}.md").write_text(f"{title}\n\n{download}{rest}", "utf-8")
    (into / path.name).write_bytes(path.read_bytes())
