"""Plain text files: texts without annotations, and parallel texts."""

import re

from headwise.corpora.readers._file import Source, bytes_of, decode, lines_of, name_of
from headwise.errors import InputError

_PARALLEL = "read_parallel"


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
    data = bytes_of(path, "read_texts")
    text = decode(data, path, "read_texts")
    # str.splitlines() would also split at form feeds and the like.
    lines = [line.rstrip() for line in re.split(r"\r\n|\r|\n", text)]
    body = "\n".join(lines).strip("\n")
    if not body:
        raise InputError(
            f"read_texts: {name_of(path)} holds no text ({len(data)} bytes). Name a text file."
        )
    return re.split(r"\n{2,}" if paragraphs else r"\n+", body)


def read_parallel(source: Source, target: Source) -> list[tuple[str, str]]:
    """Read texts and their targets from two UTF-8 files, line by line.

    Pairs of empty lines are left out.

    Raises:
        InputError: a file cannot be read or is not UTF-8, the files differ in their number of
            lines, only one line of a pair is empty, or all lines are.
    """
    sides = [[line.strip() for line in lines_of(path, _PARALLEL)] for path in (source, target)]
    counts = [len(lines) - (lines[-1] == "") for lines in sides]
    if counts[0] != counts[1]:
        raise InputError(
            f"{_PARALLEL}: {name_of(source)} has {counts[0]} lines, and {name_of(target)} has "
            f"{counts[1]}. Give as many targets as texts, one in each line."
        )
    for number, pair in enumerate(zip(*sides, strict=False), 1):
        if bool(pair[0]) != bool(pair[1]):
            path = target if pair[0] else source
            raise InputError(
                f"{_PARALLEL}: {name_of(path)}, line {number}: the line is empty, and "
                f"that of the other file is not. Fill it, or remove both lines."
            )
    pairs = [(text, target_text) for text, target_text in zip(*sides, strict=False) if text]
    if not pairs:
        raise InputError(f"{_PARALLEL}: {name_of(source)} holds no text. Name a text file.")
    return pairs
