"""Coreference: the tables of GAP."""

import os
import re

from headwise.corpora._source import Fault, fault_at, lines_of, read_each
from headwise.corpora._text import AnnotatedText, Mention

_GAP = "read_gap"
_NAMES = ("A", "B")
_HEADER = ["ID", "Text", "Pronoun", "Pronoun-offset"]
_HEADER += [f"{name}{part}" for name in _NAMES for part in ("", "-offset", "-coref")]
_HEADER += ["URL"]
_TRUTH = {"TRUE": True, "FALSE": False}
_OFFSET = re.compile(r"\d{1,9}", re.ASCII)


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
