"""Shared by all readers: the text of a file, and errors that name file and line."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import ArgumentError, InputError
from headwise.files import decode, parse_json

Source = str | os.PathLike[str] | BufferedIOBase
"""A file by its path, or one that is open, such as standard input."""


def name_of(source: Source) -> str:
    """The name of a source in errors."""
    is_path = isinstance(source, str | os.PathLike)  # whose attribute `name` lacks the folder
    return str(source if is_path else getattr(source, "name", source))


def text_of(source: Source, who: str) -> str:
    """The text of a UTF-8 file, without a byte order mark."""
    try:
        if isinstance(source, str | os.PathLike):
            return decode(Path(source).read_bytes())
        return decode(source.read())
    except OSError as error:
        raise InputError(
            f"{who}: {name_of(source)} cannot be read ({error.strerror}). Name a text file."
        ) from error
    except ValueError as error:
        raise InputError(
            f"{who}: {name_of(source)} is not UTF-8 text ({error}). Name a UTF-8 text file, or "
            f"convert it, for example with iconv."
        ) from error


def lines_of(path: Source, who: str) -> list[str]:
    """The lines of a UTF-8 file, without line breaks and without an empty last line."""
    # str.splitlines() would also split at form feeds and the like.
    lines = re.split(r"\r\n|\r|\n", text_of(path, who))
    return lines if lines[-1] else lines[:-1]


Fault = Callable[[str], InputError]
T = TypeVar("T")


def fault_at(who: str, path: Source, line: int) -> Fault:
    """Make errors that name the file and the line, counted from 1."""
    return lambda problem: InputError(f"{who}: {name_of(path)}, line {line}: {problem}")


def json_line(line: str, fault: Fault) -> Any:
    """The value of a JSON line."""
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, JSONDecodeError):  # which calls every line the first
            reason = f"{error.msg} at character {error.colno}"
        raise fault(f"not JSON ({reason}). Give one object per line.") from error


@contextmanager
def located_by(fault: Fault) -> Iterator[None]:
    """Add file and line to the errors of an annotated text."""
    try:
        yield
    except ArgumentError as error:
        raise fault(str(error).removeprefix("AnnotatedText: ")) from error


def read_each(
    path: Source, who: str, make: Callable[[str, Fault], T], *, skip: int = 0, what: str = ""
) -> list[T]:
    """What `make` reads from each line that is not blank, given a way to name its faults.

    Args:
        skip: The number of first lines that are left out.
    Raises:
        InputError: there is no such line.
    """
    lines = enumerate(lines_of(path, who)[skip:], skip + 1)
    made = [make(line, fault_at(who, path, number)) for number, line in lines if line.strip()]
    return check_filled(made, path, who, what)


def check_filled(made: list[T], path: Source, who: str, what: str = "") -> list[T]:
    """Refuse a file without a text."""
    if not made:
        what = what or "text. Name a file of the right kind"
        raise InputError(f"{who}: {name_of(path)} holds no {what}.")
    return made
