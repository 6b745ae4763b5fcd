"""The one reader of JSON: whatever is wrong with a file, it is an InputError with the path."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from headwise.errors import HeadwiseError, InputError

# What Python and its libraries raise where a value is missing or of another type.
_WRONG_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

__all__ = ["build_from", "parse_json", "read_json", "read_object"]

T = TypeVar("T")

# More digits than any size, count or seed has; Python and NumPy raise errors of many kinds beyond.
_DIGITS = 18


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, names a key twice in one object, or holds
            half a character (a lone surrogate) or a whole number of more than 18 digits.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    # Only an escape can bring half a character into a text that was decoded.
    if "\\ud" in text.lower():
        _check_characters(value)
    return value


def read_json(
    path: str | os.PathLike[str], function: str, advice: str, problem: str | None = None
) -> Any:
    """The value in a JSON file; a byte order mark is left out.

    Args:
        who: The function that an error names.
        advice: What an error tells the user to do.
        problem: What an error says of the path; None says whether it is a file, or no JSON.
    Raises:
        InputError: the file cannot be read, or `parse_json` refuses its text.
    """
    try:
        return parse_json(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        message, reason = problem or "cannot be read", str(error.strerror or error)
        raise InputError(f"{function}: {path} {message} ({reason}). {advice}") from error
    except ValueError as error:
        message = problem or "is not JSON"
        raise InputError(f"{function}: {path} {message} ({error}). {advice}") from error


def read_object(
    path: str | os.PathLike[str], function: str, advice: str, problem: str | None = None
) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: the file cannot be read, is no JSON, or holds no object.
    """
    value = read_json(path, function, advice, problem)
    if not isinstance(value, dict):
        message = f"holds no object but {str(value)[:40]}"
        message = message if problem is None else f"{problem} ({message})"
        raise InputError(f"{function}: {path} {message}. {advice}")
    return value


def build_from(
    build: Callable[[], T],
    problem: str,
    advice: str,
    keep: tuple[type[HeadwiseError], ...] = (),
) -> T:
    """What `build` makes of a file's content; content of the wrong form is an InputError.

    A file may hold a value of any type in any place. Python says so by many errors, all of which
    mean that the file is not of the form that was saved.

    Args:
        problem: How the error begins, with the path.
        advice: What the error tells the user to do.
        keep: Errors of ours that keep their type.
    Raises:
        InputError: `build` meets a value that is missing or of the wrong type.
    """
    try:
        return build()
    except InputError:
        raise  # it says what is wrong with which file
    except (*_WRONG_FORM, RuntimeError) as error:  # the last is what torch raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = type(error) if isinstance(error, keep) else InputError
        raise kind(f"{problem} ({lines[0].rstrip('.')}). {advice}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return content


def _whole_number(digits: str) -> int:
    if len(digits.removeprefix("-")) > _DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!r} is half a character") from error
