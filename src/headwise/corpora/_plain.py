"""Plain files: texts, texts with their targets or translations, and pairs of sentences."""

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
    text_of,
)
from headwise.corpora._text import AnnotatedText, Span
from headwise.errors import InputError

_PARALLEL = "read_parallel"
_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


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


def read_aligned(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    links: str | os.PathLike[str],
) -> list[AnnotatedText]:
    """Read texts and their translations, line by line, with word alignments.

    Each pair becomes one text, the source before its translation, so that a head can attend
    from the translation to the source. White space separates words. A line of links such as
    `0-0 1-2` pairs words of the source with words of the target, both counted from 0 (the
    Pharaoh format).

    Raises:
        InputError: a file cannot be read, the three differ in length, or a link names a word
            that does not exist. The error names the line.
    """
    columns = [lines_of(path, "read_aligned") for path in (source, target, links)]
    lengths = [len(lines) for lines in columns]
    if len(set(lengths)) > 1:
        raise fault_at("read_aligned", links, min(lengths))(
            f"the files have {lengths[0]}, {lengths[1]} and {lengths[2]} lines. "
            f"Give as many lines of links as of texts."
        )
    texts = [
        _aligned(text, translation, pairs, fault_at("read_aligned", links, number))
        for number, (text, translation, pairs) in enumerate(zip(*columns, strict=True), 1)
    ]
    return check_filled(texts, links, "read_aligned")


def _aligned(source: str, target: str, links: str, fault: Fault) -> AnnotatedText:
    translation = len(source) + 1
    sources, targets = _words(source, 0), _words(target, translation)
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
    text, words = f"{source} {target}", (*sources, *targets)
    return AnnotatedText(text, words, links=tuple(pairs), translation=translation)


def _words(text: str, start: int) -> list[Span]:
    return [(start + word.start(), start + word.end()) for word in re.finditer(r"\S+", text)]


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
        raise InputError(
            f"read_pairs: line {rows.line_num} of {path} is not a pair ({error}). Write "
            f"sentence,sentence,similarity."
        ) from error
    return check_filled(pairs, path, "read_pairs", "pair. Name a file of sentence pairs")


def _pair(row: list[str]) -> SentencePair:
    if len(row) != 3:
        raise ValueError(f"{counted(len(row), 'column')}, not 3")
    similarity = float(row[2])
    if not isfinite(similarity) or not row[0].strip() or not row[1].strip():
        raise ValueError("an empty sentence, or a similarity that is not a number")
    return SentencePair(row[0], row[1], similarity)
