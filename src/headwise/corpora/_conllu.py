"""CoNLL-U: sentences with dependency trees, and words as spans of the raw text."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from headwise._display import counted
from headwise.corpora._source import Fault, check_filled, fault_at, lines_of, located_by
from headwise.corpora._text import AnnotatedText, Arc, Span

_WHO = "read_conllu"
_COLUMNS = 10
_UNKNOWN = "_"
_ID = re.compile(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8})|\.([1-9]\d*))?", re.ASCII)
_HEAD = re.compile(r"\d{1,9}", re.ASCII)
_ROOT = 0  # the head of a root


def read_conllu(path: str | os.PathLike[str]) -> list[AnnotatedText]:
    """Read the sentences of a CoNLL-U file, with words, tags and basic dependencies.

    The text is that of the comment `# text = …`, else the words joined according to
    `SpaceAfter=No`. The words of a contraction get their own characters if their forms spell it
    (`do|n't`), else all of its characters (`du` is `de` and `le`). Empty nodes and enhanced
    dependencies are left out; a sentence whose heads are all `_` has no tree.

    Raises:
        InputError: the file cannot be read, a line is not CoNLL-U, the words do not spell the
            text, or the heads form no tree. The error names the line.
    Source:
        https://universaldependencies.org/format.html
    """
    texts = [parse_sentence(lines, path) for lines in blocks_of(enumerate(lines_of(path, _WHO), 1))]
    return check_filled([text for text in texts if text is not None], path, _WHO)


Lines = list[tuple[int, str]]  # with their numbers


def blocks_of(lines: Iterable[tuple[int, str]]) -> Iterator[Lines]:
    """Lines with their numbers, in blocks between blank lines."""
    for is_filled, block in groupby(lines, lambda line: bool(line[1].strip())):
        if is_filled:
            yield list(block)


@dataclass(frozen=True)
class _Row:
    """A row of columns: a word, or the contraction of the words from `first` to `last`."""

    line: int
    first: int
    last: int
    contraction: bool
    form: str
    tag: str
    head: str
    relation: str
    space_after: bool


def parse_sentence(lines: Lines, path: str | os.PathLike[str]) -> AnnotatedText | None:
    """Parse a sentence; None for a block with comments alone."""
    rows: list[_Row] = []
    text: str | None = None
    for number, line in lines:
        fault = fault_at(_WHO, path, number)
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            text = value.strip() if name.strip() == "text" else text
            continue
        row = _row(number, line, fault)
        if row is not None:
            rows.append(row)
    if not rows:
        return None
    tokens = _tokens(rows, path)
    words = [word for _, its_words in tokens for word in its_words]
    if text is None:
        text = "".join(token.form + " " * token.space_after for token, _ in tokens).rstrip()
    with located_by(fault_at(_WHO, path, lines[0][0])):
        return AnnotatedText(
            text,
            words=_spans(tokens, text, path),
            tags=tuple(row.tag for row in words) if any(w.tag != "_" for w in words) else (),
            arcs=_arcs(words, path),
        )


def _row(number: int, line: str, fault: Fault) -> _Row | None:
    """Parse a row of columns; None for an empty node."""
    columns = line.split("\t")
    if len(columns) != _COLUMNS:
        raise fault(
            f"{counted(len(columns), 'column')}. Give {_COLUMNS}, with tabs between them and blank "
            f"lines between sentences."
        )
    match = _ID.fullmatch(columns[0])
    if match is None and not re.fullmatch(r"0\.[1-9]\d*", columns[0]):
        raise fault(f"{columns[0]!r} is not a word number. Count words from 1.")
    if match is None or match[3] is not None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or not columns[1]:
        raise fault(f"the word {columns[0]!r} has the form {columns[1]!r}. Correct the line.")
    return _Row(
        line=number,
        first=first,
        last=last,
        contraction=match[2] is not None,
        form=columns[1],
        tag=columns[3],
        head=columns[6],
        relation=columns[7],
        space_after="SpaceAfter=No" not in columns[9].split("|"),
    )


def _tokens(
    rows: Sequence[_Row], path: str | os.PathLike[str]
) -> list[tuple[_Row, Sequence[_Row]]]:
    """What the text spells, each with its words: contractions, and the words outside of them."""
    words = [row for row in rows if not row.contraction]
    for number, row in enumerate(words, 1):
        if row.first != number:
            raise fault_at(_WHO, path, row.line)(
                f"the word {row.form!r} has the number {row.first}, not {number}. "
                f"Count without gaps."
            )
    tokens: list[tuple[_Row, Sequence[_Row]]] = []
    covered = 0
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if not row.contraction:
            if row.first > covered:
                tokens.append((row, [row]))
            continue
        begins = after is not None and not after.contraction and after.first == row.first
        if not begins or row.first <= covered or row.last > len(words):
            raise fault_at(_WHO, path, row.line)(
                f"the contraction {row.form!r} covers the words {row.first} to {row.last}, which "
                f"do not all follow it. Put it before its words."
            )
        covered = row.last
        tokens.append((row, words[row.first - 1 : row.last]))
    return tokens


def _spans(
    tokens: Sequence[tuple[_Row, Sequence[_Row]]], text: str, path: str | os.PathLike[str]
) -> tuple[Span, ...]:
    """The span of each word; the text must consist of these words and spaces between them."""
    spans: list[Span] = []
    start = 0
    for row, words in tokens:
        start += len(text[start:]) - len(text[start:].lstrip())
        if not text.startswith(row.form, start):
            raise fault_at(_WHO, path, row.line)(
                f"the word is {row.form!r}, but the text continues with "
                f"{text[start : start + len(row.form) + 8]!r}. Make words and text agree."
            )
        parts = [word.form for word in words]
        spans += _parts((start, start + len(row.form)), row.form, parts)
        start += len(row.form)
    if text[start:].strip():
        raise fault_at(_WHO, path, tokens[-1][0].line)(
            f"the words end, but the text continues with {text[start : start + 20]!r}. "
            f"Make words and text agree."
        )
    return tuple(spans)


def _parts(span: Span, form: str, parts: Sequence[str]) -> list[Span]:
    """The spans of the words of a contraction: their own characters, if they spell it."""
    if "".join(parts) != form:
        return [span] * len(parts)
    ends = [span[0] + sum(map(len, parts[:count])) for count in range(len(parts) + 1)]
    return list(pairwise(ends))


def _arcs(words: Sequence[_Row], path: str | os.PathLike[str]) -> tuple[Arc, ...]:
    """The tree, without its root; nothing where no word has a head."""
    if all(row.head == _UNKNOWN for row in words):
        return ()
    arcs: list[Arc] = []
    roots = 0
    for row in words:
        fault = fault_at(_WHO, path, row.line)
        if not _HEAD.fullmatch(row.head) or int(row.head) > len(words):
            raise fault(
                f"the word {row.form!r} has the head {row.head!r}. "
                f"Name a word from 1 to {len(words)}, or 0 for the root."
            )
        if int(row.head) == _ROOT:
            roots += 1
            continue
        if row.relation in ("", _UNKNOWN):
            raise fault(f"the word {row.form!r} has no relation to its head. Name it.")
        arcs.append(Arc(row.first - 1, int(row.head) - 1, row.relation))
    if roots > 1:
        raise fault_at(_WHO, path, words[0].line)(f"{roots} roots in one tree. Keep one.")
    return tuple(arcs)  # without a root there is a cycle, which AnnotatedText refuses
