"""Shared by all readers: the text of a file, and errors that name file and line."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.corpora._text import AnnotatedText
from headwise.errors import ArgumentError, InputError


def text_of(path: str | os.PathLike[str], who: str) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(
            f"{who}: {path} cannot be read ({error.strerror}). Name a text file."
        ) from error
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{who}: {path} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}). "
            f"Convert it, for example with iconv."
        ) from error


def lines_of(path: str | os.PathLike[str], who: str) -> list[str]:
    """The lines of a UTF-8 file, without line breaks."""
    # str.splitlines() would also split at form feeds and the like.
    return re.split(r"\r\n|\r|\n", text_of(path, who))


Fault = Callable[[str], InputError]


def fault_at(who: str, path: str | os.PathLike[str], line: int) -> Fault:
    """Make errors that name the file and the line, counted from 1."""
    return lambda problem: InputError(f"{who}: {path}, line {line}: {problem}")


@contextmanager
def located_by(fault: Fault) -> Iterator[None]:
    """Add file and line to the errors of an annotated text."""
    try:
        yield
    except ArgumentError as error:
        raise fault(str(error).removeprefix("AnnotatedText: ")) from error


def check_filled(
    texts: list[AnnotatedText], path: str | os.PathLike[str], who: str
) -> list[AnnotatedText]:
    """Refuse a file without a text."""
    if not texts:
        raise InputError(f"{who}: {path} holds no text. Name a file of the right kind.")
    return texts
