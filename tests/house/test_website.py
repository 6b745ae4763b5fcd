"""The site: what its build refuses, and that its navigation and reference are complete."""

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import headwise
from house.source import ROOT

SCRIPTS = ("build", "check", "commands", "names", "notebooks")
GENERATED = (
    "gallery/",
    "notebooks/",
    "reference/",
    "changelog.md",
    "contributing.md",
    "security.md",
)


@pytest.fixture
def website(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The scripts that build the site, with `build` as the way in."""
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    yield pytest.importorskip("build")
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_every_document_is_in_the_navigation(website: ModuleType) -> None:
    nav = _settings()["project"]["nav"]
    assert not list(website.not_in_navigation(ROOT / "docs", nav))
    missing = [
        name
        for name in website._files(nav)
        if not name.startswith((*GENERATED, "@")) and not (ROOT / "docs" / name).exists()
    ]
    assert not missing


def test_titles_of_the_side_bar_fit_a_line() -> None:
    items = [
        item for part in _settings()["project"]["nav"] for each in part.values() for item in each
    ]
    titles = [next(iter(item)) for item in items if isinstance(item, dict)]
    paths = [ROOT / "docs" / item for item in items if isinstance(item, str)]
    titles += [path.read_text("utf-8").split("\n")[0] for path in paths if path.exists()]
    assert len(titles) > 40
    assert [title for title in titles if len(title.removeprefix("# ")) > 24] == []


def test_a_page_outside_the_navigation_is_named(website: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "lost.md").write_text("# Lost")
    (tmp_path / "index.md").write_text("# Start")
    (fault,) = website.not_in_navigation(tmp_path, [{"Start": ["index.md"]}])
    assert fault.startswith("lost.md is missing from `nav`")


def test_every_public_name_is_in_the_reference_once(website: ModuleType) -> None:
    pages = website.names_pages()
    text = "\n".join(page for file, page in pages.items() if file != "index.md")
    lines = [line.removeprefix("::: ") for line in text.splitlines() if line.startswith(":::")]
    assert len(lines) == len(set(lines))
    modules = {"headwise.corpora", "headwise.errors"}  # their members stand on their pages
    for name in headwise.__all__:
        home = ".".join((getattr(getattr(headwise, name), "__module__", "") or "").split(".")[:2])
        assert f"headwise.{name}" in lines or home in modules, name
    assert f"[`hw.{headwise.__all__[0]}`]" in pages["index.md"]


def test_public_names_without_a_docstring_are_named(
    website: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Undocumented:
        size: int = 0

        @property
        def twice(self) -> int:
            return 2 * self.size

        def thrice(self) -> int:
            return 3 * self.size

    class Inheriting(headwise.MultiHeadAttention):
        pass

    for kind in (Undocumented, Inheriting):
        kind.__module__ = "headwise.layer"
        monkeypatch.setattr(headwise, kind.__name__, kind, raising=False)
    monkeypatch.setattr(headwise, "__all__", [*headwise.__all__, "Undocumented", "Inheriting"])
    names = ("Undocumented", "Undocumented.twice", "Undocumented.thrice", "Inheriting")
    with pytest.raises(RuntimeError) as refused:
        website.names_pages()
    assert {f"headwise.{name}" for name in names} == set(
        str(refused.value).removeprefix("Public names without a docstring: ")[:-1].split(", ")
    )


def test_what_documents_import_is_in_the_reference(website: ModuleType) -> None:
    assert not website.unexplained(website.documents())


def test_an_import_that_the_reference_lacks_is_named(website: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nfrom headwise.tables import DRAWS\n```\n")
    assert website.unexplained([page]) == ["headwise.tables.DRAWS"]


def test_every_command_is_in_the_reference(website: ModuleType) -> None:
    page = website.commands_page()
    for name in ("report", "observe", "prune", "explain"):
        assert f"## headwise {name}\n\n```text\nUsage: headwise {name} " in page


def test_faults_of_a_site_are_named(website: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="https://example.org">4</a><img src="https://example.org/x.png">'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert website.faults(tmp_path) == [
        "a.html fetches https://example.org/x.png",
        "a.html links to b.html#gone, a page without that place",
        "a.html links to c.html, which is not there",
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.stem)
def test_a_diagram_is_for_every_reader(path: Path) -> None:
    """It says what it shows, fits light and dark pages, fetches nothing, and stands on a page."""
    text = path.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title desc")
    title, description = (root.findtext(f"{{*}}{name}") for name in ("title", "desc"))
    assert title
    assert description
    assert len(description) > len(title)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|@import|@font-face|url\((?!#)", text)
    pages = "".join(page.read_text("utf-8") for page in path.parent.glob("*.md"))
    assert re.search(rf"!\[[^\]]{{40,}}\]\({re.escape(path.name)}\)", pages)


def test_links_to_files_at_the_root_lead_to_their_copies(website: ModuleType) -> None:
    text = "[a](../CHANGELOG.md#x) [b](../other.md) [c](../../CHANGELOG.md)"
    assert website._relinked(text, 0, from_root=False) == (
        "[a](changelog.md#x) [b](../other.md) [c](../../CHANGELOG.md)"
    )
    assert website._relinked(text, 1, from_root=False).endswith("[c](../changelog.md)")
    assert website._relinked("[e](../benchmarks/results/x.md#y)", 0, False) == "[e](results/x.md#y)"
    assert website._relinked("[f](../../docs/a.md)", 1, from_root=False) == "[f](../a.md)"
    assert website._relinked("[d](docs/roles.md)", 0, from_root=True) == "[d](roles.md)"


def _settings() -> dict[str, dict[str, list[object]]]:
    return tomllib.loads((ROOT / "website" / "zensical.toml").read_text("utf-8"))
