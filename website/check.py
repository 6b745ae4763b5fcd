"""The finished site: every link leads somewhere, and nothing is fetched from the network."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class _Page(HTMLParser):
    """What a page links to, what it fetches, and the places that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetches: list[str] = []
        self.places = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.places.add(value or "")
            elif (tag, name) in FETCHED or (tag == "link" and name == "href"):
                self.fetches.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")


def faults(site: Path) -> list[str]:
    """Links of a site that lead nowhere, and addresses it would fetch from the network."""
    texts = {path: path.read_text("utf-8") for path in sorted(site.rglob("*.html"))}
    pages = {path: _Page(text) for path, text in texts.items() if path.name != "404.html"}
    return [fault for path, page in pages.items() for fault in _faults(site, path, page, pages)]


def _faults(site: Path, path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    where = path.relative_to(site)
    for address in page.fetches + page.links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            if address in page.fetches and parts.scheme != "data":
                yield f"{where} fetches {address}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            yield f"{where} links to {address}, which is not there"
        elif target in pages and unquote(parts.fragment) not in pages[target].places:
            yield f"{where} links to {address}, a page without that place"
