"""Examples of a task for heads, one JSON object per line."""

import os
from dataclasses import replace
from typing import Any

from headwise.corpora._examples import Example
from headwise.corpora.readers._file import Fault, fault_at, json_line, lines_of
from headwise.errors import InputError

_WHO = "read_examples"
_KEYS = ("text", "ids", "query", "right", "wrong", "answer")


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
    if not examples:
        raise InputError(f"{_WHO}: {path} holds no example. Name a file of JSON lines.")
    return examples


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
