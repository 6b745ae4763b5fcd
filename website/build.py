"""Build the site: pages of docs/, measured tables, the reference, notebooks and the gallery.

    python website/build.py [--out site] [--gallery build/gallery]

It fails on a link that leads nowhere, a page that the navigation lacks, and a public name without
documentation. Notebooks are shown with their stored outputs: website/notebooks.py runs them.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from check import faults
from commands import commands_page
from names import names_pages, unexplained
from notebooks import notebook_page

ROOT = Path(__file__).resolve().parents[1]
DOCS, HERE, WORK = ROOT / "docs", ROOT / "website", ROOT / "build" / "website"
RESULTS = ROOT / "benchmarks" / "results"  # `results/` in the site
# Files at the root that pages link to, and what they are called in the site.
AT_ROOT = {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(\]\()((?:\.\./)+)([\w.-]+)((?:/[\w.-]+)?(?:#[\w-]*)?\))")
NO_GALLERY = "# Gallery\n\nThis site was built without it. `make gallery docs` makes it first.\n"
NOTEBOOK = re.compile(r"(\]\([\w./-]*)\.ipynb\)")  # links lead to the page that has the output


def main() -> None:
    """Build the site, or exit with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder to write")
    parser.add_argument("--gallery", type=Path, default=ROOT / "build" / "gallery")
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    reference = {"index.md": "", "commands.md": commands_page()} | names_pages()
    settings = (HERE / "zensical.toml").read_text("utf-8")
    names = ", ".join(json.dumps(f"reference/{file}") for file in reference)
    # The headings of tables are longer than a line of the side bar; the names of their files fit.
    tables = ", ".join(
        f'{{ "{path.stem.replace("-", " ").capitalize()}" = "results/{path.name}" }}'
        for path in sorted(RESULTS.glob("*.md"))
    )
    settings = settings.replace('"@reference"', names).replace('"@results"', tables)
    nav = tomllib.loads(settings)["project"]["nav"]
    wrong = [f"{name} is imported, but not in the reference" for name in unexplained(documents())]
    stop_if([*not_in_navigation(DOCS, nav), *wrong])
    pages = WORK / "pages"
    gather(pages, reference, options.gallery)
    (WORK / "zensical.toml").write_text(settings, "utf-8")
    shutil.copy(HERE / "docstrings.py", WORK)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(command, cwd=WORK).returncode:
        sys.exit("The site has the faults above.")
    stop_if(faults(WORK / "site"))
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(WORK / "site", options.out)
    print(f"The site: {options.out / 'index.html'}")


def stop_if(wrong: list[str]) -> None:
    """Exit if something is wrong, and say what."""
    if wrong:
        sys.exit("\n".join(wrong))


def documents() -> list[Path]:
    """The documents whose code runs."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def gather(pages: Path, reference: dict[str, str], gallery: Path) -> None:
    """Bring all pages together in one folder, with links that hold there."""
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.ipynb"))
    shutil.copytree(RESULTS, pages / "results")
    for name, file in AT_ROOT.items():
        shutil.copy(ROOT / name, pages / file)
    for path in pages.rglob("*.md"):
        depth = len(path.relative_to(pages).parts) - 1
        from_root = path.name in AT_ROOT.values() and depth == 0
        text = NOTEBOOK.sub(r"\1.md)", path.read_text("utf-8"))
        path.write_text(_relinked(text, depth, from_root), "utf-8")
    (pages / "reference").mkdir()
    for file, text in reference.items():
        (pages / "reference" / file).write_text(text, "utf-8")
    shutil.copytree(ROOT / "examples", pages / "examples")
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        notebook_page(path, pages / "notebooks")
    if (gallery / "index.md").is_file():  # written last: an interrupted gallery has none
        shutil.copytree(gallery, pages / "gallery")
    else:
        (pages / "gallery").mkdir()
        (pages / "gallery" / "index.md").write_text(NO_GALLERY, "utf-8")
    for file in ("website.css", "iframe-worker.js"):
        shutil.copy(HERE / file, pages / file)


def not_in_navigation(pages: Path, nav: list[Any]) -> Iterator[str]:
    """Pages that no reader would find."""
    listed = set(_files(nav))
    for path in sorted(pages.rglob("*.md")):
        if str(path.relative_to(pages)) not in listed:
            yield f"{path.relative_to(pages)} is missing from `nav` in website/zensical.toml"


def _files(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _files(item)


def _relinked(text: str, depth: int, from_root: bool) -> str:
    """A page whose links to files outside docs/ lead to their copies in the site."""
    text = text.replace(f"]({'../' * (depth + 1)}benchmarks/results/", f"]({'../' * depth}results/")
    text = text.replace("](../../docs/", "](../")  # from the results
    if from_root:
        text = text.replace("](benchmarks/results/", "](results/")
        for name, file in AT_ROOT.items():
            text = text.replace(f"]({name}", f"]({file}")
        return text.replace("](docs/", "](").replace("](LICENSE)", "](index.md)")

    def relink(link: re.Match[str]) -> str:
        opening, ups, name, rest = link.groups()
        copied = AT_ROOT | {"examples": "examples"}
        at_root = ups.count("../") == depth + 1 and name in copied
        return f"{opening}{'../' * depth}{copied[name]}{rest}" if at_root else link[0]

    return LINK.sub(relink, text)


if __name__ == "__main__":
    main()
