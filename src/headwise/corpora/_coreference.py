"""Coreference: the tables of GAP, and the bracketed sentences of WinoBias."""

import os
import re
from dataclasses import replace

from headwise.corpora._source import Fault, fault_at, lines_of, located_by, read_each
from headwise.corpora._text import AnnotatedText, Mention

_GAP = "read_gap"
_WINOBIAS = "read_winobias"
_NAMES = ("A", "B")
_HEADER = ["ID", "Text", "Pronoun", "Pronoun-offset"]
_HEADER += [f"{name}{part}" for name in _NAMES for part in ("", "-offset", "-coref")]
_HEADER += ["URL"]
_TRUTH = {"TRUE": True, "FALSE": False}
_OFFSET = re.compile(r"\d{1,9}", re.ASCII)
_NUMBER = re.compile(r"\d+[\s.)]+")
_PRONOUN = re.compile(
    r"s?he|him|his|hers?|they|them|theirs?|(him|her)self|themselves", re.IGNORECASE
)


def read_gap(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read the texts of a GAP table: a pronoun, and two names that it may refer to.

    Mentions are the pronoun (entity 0), A and B; a name that the pronoun refers to is entity 0
    too, any other is an entity of its own.

    Raises:
        InputError: the file cannot be read, has other columns, or a name is not at its offset.
            The error names the line.
    Source:
        Webster et al. 2018, "Mind the GAP";
        https://github.com/google-research-datasets/gap-coreference
    """
    header = next(iter(lines_of(path, _GAP)), "")
    if header.split("\t") != _HEADER:
        raise fault_at(_GAP, path, 1)(
            f"the columns are {header[:60]!r}. Give a GAP table with {', '.join(_HEADER)}."
        )
    return read_each(path, _GAP, _gap, skip=1)


def _gap(line: str, fault: Fault) -> AnnotatedText:
    columns = line.split("\t")
    if len(columns) != len(_HEADER):
        raise fault(f"{len(columns)} columns. Give {len(_HEADER)}, with tabs between them.")
    row = dict(zip(_HEADER, columns, strict=True))
    mentions = [_mention(row, "Pronoun", 0, fault)]
    for entity, name in enumerate(_NAMES, 1):
        truth = row[f"{name}-coref"]
        if truth.upper() not in _TRUTH:
            raise fault(f"{name}-coref is {truth!r}. Give TRUE or FALSE.")
        mentions.append(_mention(row, name, 0 if _TRUTH[truth.upper()] else entity, fault))
    return AnnotatedText(row["Text"], mentions=tuple(mentions))


def _mention(row: dict[str, str], name: str, entity: int, fault: Fault) -> Mention:
    offset, form = row[f"{name}-offset"], row[name]
    valid = _OFFSET.fullmatch(offset) is not None
    if not form or not valid or not row["Text"].startswith(form, int(offset)):
        actual = row["Text"][int(offset) :][:20] if valid else ""
        raise fault(
            f"{name} is {form!r} at {offset!r}, where the text has {actual!r}. "
            f"Count characters, from 0."
        )
    return Mention(int(offset), int(offset) + len(form), entity, name == "Pronoun")


def read_winobias(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read the sentences of a WinoBias file, where `[…]` marks the mentions of one entity.

    A number before a sentence is dropped, and so are the brackets. White space at the ends of a
    mention does not belong to it. The other person of a sentence has no brackets there, but has
    them in the sentence that it is paired with: every phrase that is a mention somewhere in the
    file and occurs outside of brackets is a mention of an entity of its own.

    Raises:
        InputError: the file cannot be read, brackets do not close or are nested, or a sentence
            has fewer than two mentions. The error names the line.
    Source:
        Zhao et al. 2018, "Gender Bias in Coreference Resolution"
    """
    texts = read_each(path, _WINOBIAS, _bracketed)
    people = {
        text.text[mention.start : mention.end].lower()
        for text in texts
        for mention in text.mentions
        if not mention.pronoun
    }
    # The longest first, so that part of a longer phrase is no mention.
    phrases = "|".join(re.escape(person) for person in sorted(people, key=len, reverse=True))
    person = re.compile(rf"\b(?:{phrases})\b", re.IGNORECASE)
    return [_with_others(text, person) for text in texts]


def _with_others(text: AnnotatedText, person: re.Pattern[str]) -> AnnotatedText:
    """The text with the people outside of its brackets as further mentions."""
    marked = [(mention.start, mention.end) for mention in text.mentions]
    others = [
        match.span()
        for match in person.finditer(text.text)
        if match.group()
        and all(match.end() <= start or end <= match.start() for start, end in marked)
    ]
    added = tuple(Mention(*span, entity) for entity, span in enumerate(others, 1))
    return replace(text, mentions=text.mentions + added)


def _bracketed(line: str, fault: Fault) -> AnnotatedText:
    line = _NUMBER.sub("", line.strip(), count=1) if _NUMBER.match(line.strip()) else line.strip()
    text, mentions = "", []
    opened: int | None = None
    for part in re.split(r"([\[\]])", line):
        if part not in ("[", "]"):
            text += part
            continue
        if (part == "[") != (opened is None):
            raise fault(f"brackets do not match in {line[:60]!r}. Open and close each mention.")
        if opened is None:
            opened = len(text)
        else:
            inside = text[opened:]
            start = opened + len(inside) - len(inside.lstrip())
            pronoun = _PRONOUN.fullmatch(inside.strip()) is not None
            mentions.append(Mention(start, start + len(inside.strip()), 0, pronoun))
            opened = None
    if opened is not None or len(mentions) < 2:
        raise fault(
            f"{len(mentions)} closed mentions in {line[:60]!r}. Give at least two that corefer."
        )
    with located_by(fault):
        return AnnotatedText(text, mentions=tuple(mentions))
