"""Plain files and tables: texts, texts with targets, pairs of sentences, pronouns and names."""

import csv
import io
import os
import re
from dataclasses import dataclass
from math import isfinite

from headwise._display import counted
from headwise.corpora._source import (
    Fault,
    Source,
    check_filled,
    fault_at,
    lines_of,
    name_of,
    read_each,
    text_of,
)
from headwise.corpora._text import AnnotatedText, Mention
from headwise.errors import InputError

_PARALLEL = "read_parallel"
_GAP = "read_gap"
_NAMES = ("A", "B")
_HEADER = ["ID", "Text", "Pronoun", "Pronoun-offset"]
_HEADER += [f"{name}{part}" for name in _NAMES for part in ("", "-offset", "-coref")]
_HEADER += ["URL"]
_TRUTH = {"TRUE": True, "FALSE": False}
_OFFSET = re.compile(r"\d{1,9}", re.ASCII)


def read_texts(path: Source, *, paragraphs: bool = False) -> list[str]:
    """Read the texts of a UTF-8 file: its lines, or its paragraphs.

    The file may also be open, such as `sys.stdin.buffer`. A byte order mark, white space at the end
    of lines, and blank lines are dropped.

    Args:
        paragraphs: Whether the lines between blank lines are one text, which keeps its line
            breaks. Otherwise each line is a text.
    Raises:
        InputError: the file cannot be read, is not UTF-8, or holds only white space.
    """
    body = "\n".join(line.rstrip() for line in lines_of(path, "read_texts")).strip("\n")
    if not body:
        raise InputError(f"read_texts: {name_of(path)} holds no text. Name a text file.")
    return re.split(r"\n{2,}" if paragraphs else r"\n+", body)


def read_parallel(source: Source, target: Source) -> list[tuple[str, str]]:
    """Read texts and their targets from two UTF-8 files, line by line.

    Pairs of empty lines are left out.

    Raises:
        InputError: a file cannot be read or is not UTF-8, the files differ in their number of
            lines, only one line of a pair is empty, or all lines are.
    """
    sides = [[line.strip() for line in lines_of(path, _PARALLEL)] for path in (source, target)]
    counts = [len(lines) for lines in sides]
    if counts[0] != counts[1]:
        raise InputError(
            f"{_PARALLEL}: {name_of(source)} has {counts[0]} lines, and {name_of(target)} has "
            f"{counts[1]}. Give as many targets as texts, one in each line."
        )
    pairs = [(text, translation) for text, translation in zip(*sides, strict=True)]
    for number, pair in enumerate(pairs, 1):
        if bool(pair[0]) != bool(pair[1]):
            path = target if pair[0] else source
            raise InputError(
                f"{_PARALLEL}: {name_of(path)}, line {number}: the line is empty, and "
                f"that of the other file is not. Fill it, or remove both lines."
            )
    pairs = [pair for pair in pairs if pair[0]]
    if not pairs:
        raise InputError(f"{_PARALLEL}: {name_of(source)} holds no text. Name a text file.")
    return pairs


@dataclass(frozen=True)
class SentencePair:
    """Two sentences and their similarity as rated by people; higher is more similar."""

    one: str
    two: str
    similarity: float


def read_pairs(path: str | os.PathLike[str]) -> list[SentencePair]:
    """Read a CSV file without a header: a sentence, another, and their similarity in each row.

    Raises:
        InputError: the file cannot be read, is not UTF-8, has no row, or a row is not such a pair.
    """
    rows = csv.reader(io.StringIO(text_of(path, "read_pairs"), newline=""), strict=True)
    try:
        pairs = [_pair(row) for row in rows if row]
    except (csv.Error, ValueError) as error:
        problem = f"no pair ({error}). Write sentence,sentence,similarity."
        raise fault_at("read_pairs", path, rows.line_num)(problem) from error
    return check_filled(pairs, path, "read_pairs", "pair. Name a file of sentence pairs")


def _pair(row: list[str]) -> SentencePair:
    if len(row) != 3:
        raise ValueError(f"{counted(len(row), 'column')}, not 3")
    similarity = float(row[2])
    if not isfinite(similarity):
        raise ValueError(f"the similarity is {row[2].strip()}, not a number")
    if not row[0].strip() or not row[1].strip():
        raise ValueError("one of the sentences is empty")
    return SentencePair(row[0], row[1], similarity)


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
