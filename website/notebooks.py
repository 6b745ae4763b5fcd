"""Notebooks of the documentation: run them and store their outputs, or write them as pages.

python website/notebooks.py                # after a change: runs docs/notebooks, for a few minutes
python website/notebooks.py --model FILE   # runs the one on a chat model, with its GGUF file
"""

import argparse
import base64
import re
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
CHAT = NOTEBOOKS / "chat-model.ipynb"  # reads a file that no package for development brings
SECONDS = 1200  # of a cell, on a busy machine


def main() -> None:
    """Run each notebook in an empty folder and store its outputs in it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, help=f"the file that {CHAT.name} opens")
    model: Path | None = parser.parse_args().model
    paths = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if path != CHAT]
    for path in paths if model is None else [CHAT]:
        with TemporaryDirectory() as folder:
            if model is not None:
                shutil.copy(model, folder)
            nbformat.write(run_notebook(path, Path(folder)), path)
        print(path.name, flush=True)


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook from its first cell to its last, in a folder, and keep what readers see.

    Progress and warnings are dropped, since they hold paths of this machine, and so is the version
    of Python: the same code gives the same file.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    from nbclient import NotebookClient  # the site needs only what is stored

    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=resources, record_timing=False).execute()
    notebook.metadata = metadata
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_light, cell.outputs) if output]
    return notebook


def _light(output: Any) -> Any:
    """An output without what no reader sees; None for progress and warnings."""
    from PIL import Image

    data = output.get("data", {})
    if output.get("name") == "stderr" or data.get("text/html") == "":
        return None
    if "image/png" in data:
        picture = Image.open(BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        small = BytesIO()
        # With 128 colors a figure looks the same, in a third of the bytes. The default method of
        # `quantize` gives small patches, such as those of a legend, the color of others.
        few = picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "png", optimize=True)
        data["image/png"] = base64.b64encode(small.getvalue()).decode()
    if "text/html" in data:
        data["text/html"] = re.sub(r"<style.*?</style>|\n\s*", "", data["text/html"], flags=re.S)
    return output


def notebook_page(path: Path, into: Path) -> None:
    """Write a notebook and its stored outputs as Markdown, with its pictures beside it."""
    into.mkdir(parents=True, exist_ok=True)
    cells = nbformat.read(path, as_version=4).cells
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
    """One output as Markdown: a picture, a table, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        (into / picture).write_bytes(base64.b64decode(data["image/png"]))
        yield f"![Output of the cell above]({picture})"
    elif "text/html" in data:
        yield data["text/html"]
    elif "text/plain" in data or output.get("name") == "stdout":
        yield f"```text\n{data.get('text/plain', output.get('text', '')).rstrip()}\n```"


if __name__ == "__main__":
    main()
