"""Pairs of sentences with a similarity, as in the STS benchmark."""

import csv
import io
import os
from dataclasses import dataclass
from math import isfinite

from headwise._display import counted
from headwise.corpora.readers._file import text_of
from headwise.errors import InputError


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
    pairs = []
    try:
        for row in rows:
            if row:
                pairs.append(_pair(row))
    except (csv.Error, ValueError) as error:
        raise InputError(
            f"read_pairs: line {rows.line_num} of {path} is not a pair ({error}). Write "
            f"sentence,sentence,similarity."
        ) from error
    if not pairs:
        raise InputError(f"read_pairs: {path} holds no pair. Name a file of sentence pairs.")
    return pairs


def _pair(row: list[str]) -> SentencePair:
    if len(row) != 3:
        raise ValueError(f"{counted(len(row), 'column')}, not 3")
    similarity = float(row[2])
    if not isfinite(similarity) or not row[0].strip() or not row[1].strip():
        raise ValueError("an empty sentence, or a similarity that is not a number")
    return SentencePair(row[0], row[1], similarity)
