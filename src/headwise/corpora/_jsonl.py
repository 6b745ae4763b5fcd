"""JSON lines: annotated texts, and examples of a task for heads."""

import os
from dataclasses import replace
from typing import Any

from headwise.corpora._source import (
    Fault,
    check_filled,
    fault_at,
    json_line,
    lines_of,
    located_by,
    read_each,
)
from headwise.corpora._text import AnnotatedText, Arc, Example, Mention, Pair

_WHO = "read_examples"
_KEYS = ("text", "ids", "query", "right", "wrong", "answer")


def read_jsonl(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read annotated texts from JSON lines, one object per line.

    The keys are the attributes of `AnnotatedText`: `{"text": "Ann sang", "words": [[0, 3], [4, 8]],
    "tags": ["PROPN", "VERB"], "arcs": [[0, 1, "nsubj"]], "mentions": [[0, 3, 0]],
    "pairs": [[1, 0, "singer"]]}`; all but the text may be left out. A mention may end
    with `true`: a pronoun. A pair is a relation of your own, from the first word to the second.

    Raises:
        InputError: the file cannot be read, a line is not such an object, or annotations do not fit
            their text. The error names the line.
    """
    return read_each(path, "read_jsonl", _annotated)


# For each list, the types of the entries of an item, and its constructor. The last entry of a
# mention may be left out.
_ITEMS: dict[str, tuple[tuple[type, ...], Any]] = {
    "words": ((int, int), lambda *span: span),
    "arcs": ((int, int, str), Arc),
    "mentions": ((int, int, int, bool), Mention),
    "pairs": ((int, int, str), Pair),
}


_SHAPE = {int: "number", str: "name", bool: "true for a pronoun"}


def _annotated(line: str, fault: Fault) -> AnnotatedText:
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


def read_examples(path: str | os.PathLike[str]) -> list[Example]:
    """Read examples from JSON lines, one object per line.

    The keys are the attributes of `Example`: `{"text": "the red fox . who ?", "query": [14, 17],
    "right": [[4, 11]], "wrong": [[0, 3]], "answer": "fox"}`. A list of token ids as `ids` takes
    the place of `text`, and positions then count tokens. The answer may be left out.

    Raises:
        InputError: the file cannot be read or holds no example, or a line is not such an object.
            The error names the line.
    """
    examples = [
        replace(_example(line, fault_at(_WHO, path, number)), source=f"{path}, line {number}")
        for number, line in enumerate(lines_of(path, _WHO), 1)
        if line.strip()
    ]
    return check_filled(examples, path, _WHO, "example. Name a file of JSON lines")


def read_answers(path: str | os.PathLike[str]) -> list[tuple[str, str, str | None]]:
    """Read texts with two answers each from JSON lines, as `headwise.effects` takes them.

    The keys are `{"text": "Mary and John left , and John called", "right": " Mary", "other":
    " John"}`; the other answer may be left out.

    Raises:
        InputError: the file cannot be read or holds no example, or a line is not such an object.
            The error names the line.
    """
    return read_each(path, "read_answers", _answers, what="example. Name a file of JSON lines")


def _answers(line: str, fault: Fault) -> tuple[str, str, str | None]:
    fields = json_line(line, fault)
    is_object = isinstance(fields, dict)
    unknown = sorted(fields.keys() - {"text", "right", "other"}) if is_object else []
    text, right, other = (fields.get(x) if is_object else None for x in ("text", "right", "other"))
    texts = isinstance(text, str) and isinstance(right, str) and isinstance(other, str | None)
    if unknown or not texts:
        raise fault(
            f"{line[:40]!r} is not an object with the strings text, right and, where there is "
            f"one, other. Give one object per line."
        )
    return str(text), str(right), other


def _example(line: str, fault: Fault) -> Example:
    fields = json_line(line, fault)
    is_object = isinstance(fields, dict) and ("text" in fields) != ("ids" in fields)
    missing = [name for name in ("query", "right", "wrong") if not is_object or name not in fields]
    if not is_object or missing:
        raise fault(
            f"{line[:40]!r} is not an object with text or ids, query, right and wrong. Give one "
            f"object per line."
        )
    if unknown := sorted(fields.keys() - set(_KEYS)):
        raise fault(f"{unknown[0]!r} is not a key of an example. Choose from {', '.join(_KEYS)}.")
    text = fields.get("text", fields.get("ids"))
    answer = fields.get("answer", ())
    if ("text" in fields) != isinstance(text, str) or not _is_text(text):
        raise fault(
            f"its text is {text!r:.40}. Give a string as text, or a list of numbers as ids."
        )
    if answer != () and not _is_text(answer):
        raise fault(f"its answer is {answer!r:.40}. Give a string, or a list of numbers.")
    spans = [_spans(name, fields[name], fault) for name in ("query", "right", "wrong")]
    return Example(text, spans[0], spans[1], spans[2], answer)


def _is_text(value: Any) -> bool:
    """Whether it is a string or a list of token ids."""
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    return isinstance(value, str) or is_ids


def _spans(name: str, value: Any, fault: Fault) -> list[tuple[int, int]]:
    """One pair of numbers, or a list of them."""
    pairs = [value] if isinstance(value, list) and any(type(x) is int for x in value) else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in pairs
    ):
        raise fault(f"{name} is {str(value)[:40]}. Give [start, end], or a list of them.")
    return [(start, end) for start, end in pairs]
