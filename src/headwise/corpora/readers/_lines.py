"""One text per line: JSON with spans, and pairs of texts with aligned words."""

import os
import re
from typing import Any

from headwise.corpora._text import AnnotatedText, Arc, Mention, Pair, Span
from headwise.corpora.readers._file import (
    Fault,
    check_filled,
    fault_at,
    json_line,
    lines_of,
    located_by,
)

_JSONL = "read_jsonl"
_ALIGNED = "read_aligned"
_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


def read_jsonl(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read annotated texts from JSON lines, one object per line.

    The keys are the attributes of `AnnotatedText`: `{"text": "Ann sang", "words": [[0, 3], [4, 8]],
    "tags": ["PROPN", "VERB"], "arcs": [[0, 1, "nsubj"]], "mentions": [[0, 3, 0]],
    "pairs": [[1, 0, "singer"]], "links": []}`; all but the text may be left out. A mention may end
    with `true`: a pronoun. A pair is a relation of your own, from the first word to the second.

    Raises:
        InputError: the file cannot be read, a line is not such an object, or annotations do not fit
            their text. The error names the line.
    """
    texts = [
        _from_json(line, fault_at(_JSONL, path, number))
        for number, line in enumerate(lines_of(path, _JSONL), 1)
        if line.strip()
    ]
    return check_filled(texts, path, _JSONL)


# For each list, the types of the entries of an item, and its constructor. The last entry of a
# mention may be left out.
_ITEMS: dict[str, tuple[tuple[type, ...], Any]] = {
    "words": ((int, int), lambda *span: span),
    "arcs": ((int, int, str), Arc),
    "mentions": ((int, int, int, bool), Mention),
    "pairs": ((int, int, str), Pair),
    "links": ((int, int), lambda *pair: pair),
}


_SHAPE = {int: "number", str: "name", bool: "true for a pronoun"}


def _from_json(line: str, fault: Fault) -> AnnotatedText:
    fields = json_line(line, fault)
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise fault(f"{line[:40]!r} is not an object with a text. Give one object per line.")
    unknown = sorted(fields.keys() - {"text", "tags", *_ITEMS})
    if unknown:
        raise fault(
            f"{unknown[0]!r} is not a key of an annotated text. "
            f"Choose from text, tags, {', '.join(_ITEMS)}."
        )
    lists: dict[str, Any] = {name: _items(name, fields.get(name, []), fault) for name in _ITEMS}
    tags = fields.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise fault(f"tags are {str(tags)[:40]!r}. Give a list of strings.")
    with located_by(fault):
        return AnnotatedText(fields["text"], tags=tuple(tags), **lists)


def _items(name: str, items: Any, fault: Fault) -> tuple[Any, ...]:
    kinds, make = _ITEMS[name]
    if not isinstance(items, list):
        raise fault(f"{name} are {str(items)[:40]!r}. Give a list.")
    for item in items:
        # isinstance(True, int) holds, but a bool in a file is a mistake.
        types = list(map(type, item)) if isinstance(item, list) else []
        if types not in [list(kinds), [kind for kind in kinds if kind is not bool]]:
            shape = ", ".join(_SHAPE[kind] for kind in kinds)
            raise fault(f"{name} hold {str(item)[:40]!r}. Give [{shape}].")
    return tuple(make(*item) for item in items)


def read_aligned(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    links: str | os.PathLike[str],
    joint: str = " ",
) -> list[AnnotatedText]:
    """Read texts and their translations, line by line, with word alignments.

    Each pair becomes one text, the source before its translation, so that a head can attend
    from the translation to the source. White space separates words. A line of links such as
    `0-0 1-2` pairs words of the source with words of the target, both counted from 0 (the
    Pharaoh format).

    Args:
        joint: The string between source and translation.
    Raises:
        InputError: a file cannot be read, the three differ in length, or a link names a word
            that does not exist. The error names the line.
    """
    columns = [lines_of(path, _ALIGNED) for path in (source, target, links)]
    lengths = [len(lines) - (lines[-1] == "") for lines in columns]
    if len(set(lengths)) > 1:
        raise fault_at(_ALIGNED, links, min(lengths))(
            f"the files have {lengths[0]}, {lengths[1]} and {lengths[2]} lines. "
            f"Give as many lines of links as of texts."
        )
    texts = [
        _pair(text, translation, pairs, joint, fault_at(_ALIGNED, links, number))
        for number, (text, translation, pairs) in enumerate(zip(*columns, strict=False), 1)
        if number <= lengths[0]
    ]
    return check_filled(texts, links, _ALIGNED)


def _pair(source: str, target: str, links: str, joint: str, fault: Fault) -> AnnotatedText:
    sources, targets = _words(source, 0), _words(target, len(source) + len(joint))
    pairs: list[tuple[int, int]] = []
    for link in links.split():
        match = _LINK.fullmatch(link)
        if match is None:
            raise fault(f"{link!r} is not a link. Give them as 0-0 1-2.")
        source_word, target_word = int(match[1]), int(match[2])
        if source_word >= len(sources) or target_word >= len(targets):
            raise fault(
                f"the link {link} between {len(sources)} and {len(targets)} words. "
                f"Count words from 0."
            )
        pairs.append((len(sources) + target_word, source_word))
    text, words = source + joint + target, (*sources, *targets)
    return AnnotatedText(text, words, links=tuple(pairs), translation=len(source) + len(joint))


def _words(text: str, start: int) -> list[Span]:
    return [(start + word.start(), start + word.end()) for word in re.finditer(r"\S+", text)]
