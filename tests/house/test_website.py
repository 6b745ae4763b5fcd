"""The site: every page is in its navigation, and every public name in its reference."""

import sys
import tomllib
from collections.abc import Iterator
from types import ModuleType

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


def test_what_documents_import_is_in_the_reference(website: ModuleType) -> None:
    assert not website.unexplained(website.documents())


def _settings() -> dict[str, dict[str, list[object]]]:
    return tomllib.loads((ROOT / "website" / "zensical.toml").read_text("utf-8"))
