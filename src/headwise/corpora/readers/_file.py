"""What all readers share: the text of a file, and where in it something is wrong."""

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
    """The lines of a UTF-8 file, without what ends them."""
    # Not splitlines(): form feeds and the like do not end a line in a text file.
    return re.split(r"\r\n|\r|\n", text_of(path, who))


Fault = Callable[[str], InputError]


def fault_at(who: str, path: str | os.PathLike[str], line: int) -> Fault:
    """Make errors that name the file and the line, counted from 1."""
    return lambda what: InputError(f"{who}: {path}, line {line}: {what}")


@contextmanager
def told_by(fault: Fault) -> Iterator[None]:
    """Let what is wrong with an annotated text be told with file and line."""
    try:
        yield
    except ArgumentError as error:
        raise fault(str(error).removeprefix("AnnotatedText: ")) from error


def some(texts: list[AnnotatedText], path: str | os.PathLike[str], who: str) -> list[AnnotatedText]:
    """Refuse a file without a text."""
    if not texts:
        raise InputError(f"{who}: {path} holds no text. Name a file of the right kind.")
    return texts
