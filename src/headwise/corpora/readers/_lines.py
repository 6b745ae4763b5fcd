"""One text a line: our own JSON with spans, and pairs of texts with aligned words."""

import os
import re
from typing import Any

from headwise.corpora._text import AnnotatedText, Arc, Mention, Span
from headwise.corpora.readers._file import Fault, fault_at, lines_of, some, told_by
from headwise.files import parse_json

_JSONL = "read_jsonl"
_ALIGNED = "read_aligned"
_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


def read_jsonl(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read annotated texts from JSON, one object a line.

    Its names are those of `AnnotatedText`: `{"text": "Ann sang", "words": [[0, 3], [4, 8]],
    "tags": ["PROPN", "VERB"], "arcs": [[0, 1, "nsubj"]], "mentions": [[0, 3, 0]],
    "links": []}`; all but the text may be left out.

    Raises:
        InputError: the file cannot be read, a line is no such object, or what it says does not
            fit its text: with the line.
    """
    texts = [
        _from_json(line, fault_at(_JSONL, path, number))
        for number, line in enumerate(lines_of(path, _JSONL), 1)
        if line.strip()
    ]
    return some(texts, path, _JSONL)


# What an item of each list is made of, and what it becomes.
_ITEMS: dict[str, tuple[tuple[type, ...], Any]] = {
    "words": ((int, int), lambda *span: span),
    "arcs": ((int, int, str), Arc),
    "mentions": ((int, int, int), Mention),
    "links": ((int, int), lambda *pair: pair),
}


def _from_json(line: str, fault: Fault) -> AnnotatedText:
    try:
        given = parse_json(line)
    except ValueError as error:
        raise fault(f"no JSON ({error}). Give one object a line.") from error
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise fault(f"{line[:40]!r} is no object with a text. Give one object a line.")
    if any("\ud800" <= character <= "\udfff" for character in given["text"]):
        raise fault(f"the text {given['text'][:40]!a} has half of a surrogate pair. Mend it.")
    unknown = sorted(given.keys() - {"text", "tags", *_ITEMS})
    if unknown:
        raise fault(
            f"{unknown[0]!r} is nothing that is known of a text. "
            f"There are text, tags, {', '.join(_ITEMS)}."
        )
    found = {name: _items(name, given.get(name, []), fault) for name in _ITEMS}
    tags = given.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise fault(f"tags are {str(tags)[:40]!r}. Give a list of strings.")
    with told_by(fault):
        return AnnotatedText(given["text"], tags=tuple(tags), **found)


def _items(name: str, items: Any, fault: Fault) -> tuple[Any, ...]:
    kinds, make = _ITEMS[name]
    if not isinstance(items, list):
        raise fault(f"{name} are {str(items)[:40]!r}. Give a list.")
    for item in items:
        # A bool is an int to Python, and none to the reader of a file.
        if not isinstance(item, list) or [type(part) for part in item] != list(kinds):
            shape = ", ".join("number" if kind is int else "name" for kind in kinds)
            raise fault(f"{name} hold {str(item)[:40]!r}. Give [{shape}].")
    return tuple(make(*item) for item in items)


def read_aligned(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    links: str | os.PathLike[str],
    joint: str = " ",
) -> list[AnnotatedText]:
    """Read texts and their translations, line by line, with which word translates which.

    Each becomes one text, the source before its translation, so that a head can look from the
    one to the other. Words are what stands between white space. A line of links is `0-0 1-2`:
    word of the source, word of the target, both from 0 (the Pharaoh format).

    Args:
        joint: What stands between source and translation.
    Raises:
        InputError: a file cannot be read, the three differ in length, or a link names a word
            that is not there: with the line.
    """
    columns = [lines_of(path, _ALIGNED) for path in (source, target, links)]
    lengths = [len(lines) - (lines[-1] == "") for lines in columns]
    if len(set(lengths)) > 1:
        raise fault_at(_ALIGNED, links, min(lengths))(
            f"the files have {lengths[0]}, {lengths[1]} and {lengths[2]} lines. "
            f"Give as many lines of links as of texts."
        )
    texts = [
        _pair(
            columns[0][at], columns[1][at], columns[2][at], joint, fault_at(_ALIGNED, links, at + 1)
        )
        for at in range(lengths[0])
    ]
    return some(texts, links, _ALIGNED)


def _pair(source: str, target: str, links: str, joint: str, fault: Fault) -> AnnotatedText:
    sources, targets = _words(source, 0), _words(target, len(source) + len(joint))
    pairs: list[tuple[int, int]] = []
    for link in links.split():
        found = _LINK.fullmatch(link)
        if found is None:
            raise fault(f"{link!r} is no link. Give them as 0-0 1-2.")
        of, to = int(found[1]), int(found[2])
        if of >= len(sources) or to >= len(targets):
            raise fault(
                f"the link {link} between {len(sources)} and {len(targets)} words. "
                f"Count words from 0."
            )
        pairs.append((len(sources) + to, of))
    return AnnotatedText(source + joint + target, (*sources, *targets), links=tuple(pairs))


def _words(text: str, start: int) -> list[Span]:
    return [(start + word.start(), start + word.end()) for word in re.finditer(r"\S+", text)]
