"""Text and JSON of files: written whole, and read strictly; an InputError names the path."""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headwise._display import first_line
from headwise.errors import InputError
from headwise.files._atomic import as_path, write_beside

_KINDS = {
    b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a ZIP archive (such as .docx, .xlsx or .npz)",
    b"%PDF": "a PDF",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by Zstandard",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}

_LONGEST_HEADER = 100_000_000  # of a safetensors file, in bytes, by its specification


def kind_of(data: bytes) -> str:
    """The kind of a file that is not UTF-8 text, by its first bytes; empty if unknown."""
    for start, kind in _KINDS.items():
        if data.startswith(start):
            return kind
    # A safetensors file: the length of a JSON header, then the header.
    is_tensors = data[8:10] == b'{"' and int.from_bytes(data[:8], "little") < _LONGEST_HEADER
    return "a safetensors file" if is_tensors else ""


def decode(data: bytes) -> str:
    """The text of these bytes, without a byte order mark; a ValueError says what else they are."""
    if kind := kind_of(data):
        raise ValueError(f"it is {kind}")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise ValueError(f"{byte}, which is not UTF-8") from error


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# The errors of Python and its libraries for a missing value or a value of the wrong type.
_WRONG_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

T = TypeVar("T")
File = TypeVar("File", bound="JsonFile")

# Enough digits for any size, count or seed. Larger integers raise various errors in NumPy.
_DIGITS = 18


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, repeats a key in one object, or
            holds a lone surrogate or an integer of more than 18 digits.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    # In a decoded text, a lone surrogate can only come from an escape.
    if "\\ud" in text.lower():
        _check_characters(value)
    return value


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a file; a pipe or a device, which may never end, is refused."""
    if (path := Path(path)).exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a folder" if path.is_dir() else "no regular file")
    return path.read_bytes()


def write_json(content: Any, path: str | os.PathLike[str], indent: int | None = 2) -> Path:
    """Write a value as JSON, indented or on one line.

    Raises:
        OutputError: the file cannot be written. No partial file is left behind.
    """
    target = as_path("save", path)
    with write_beside(target) as beside:
        beside.write_text(json.dumps(content, indent=indent) + "\n", "utf-8")
    return target


def without_nan(content: Any) -> Any:
    """The same lists, arrays and objects with null for NaN, which JSON does not have."""
    content = content.tolist() if hasattr(content, "tolist") else content
    if isinstance(content, Mapping):
        return {name: without_nan(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_nan(value) for value in content]
    return None if content != content else content  # only NaN differs from itself


def read_json(
    path: str | os.PathLike[str], function: str, advice: str, problem: str | None = None
) -> Any:
    """The value in a JSON file. A byte order mark is skipped.

    Args:
        function: The function that an error message begins with.
        advice: What the error message advises.
        problem: What the error message says about the path. None says that the file cannot be
            read, or that it is not JSON.
    """
    path = as_path(function, path)
    try:
        return parse_json(decode(read_regular(path)))
    except OSError as error:
        message, reason = problem or "cannot be read", str(error.strerror or error)
        raise InputError(f"{function}: {path} {message} ({reason}). {advice}") from error
    except ValueError as error:
        message = problem or "is not JSON"
        raise InputError(f"{function}: {path} {message} ({error}). {advice}") from error


def read_object(
    path: str | os.PathLike[str], function: str, advice: str, problem: str | None = None
) -> dict[str, Any]:
    """The object in a JSON file."""
    value = read_json(path, function, advice, problem)
    if not isinstance(value, dict):
        message = f"holds no object but {str(value)[:40]}"
        message = message if problem is None else f"{problem} ({message})"
        raise InputError(f"{function}: {path} {message}. {advice}")
    return value


def build_from(build: Callable[[], T], problem: str, advice: str) -> T:
    """The result of `build` on a file's content; content of the wrong form is an InputError.

    A file may hold a value of any type in any place. Python then raises one of many errors, all
    of which mean that the file does not have the form that was saved.

    Args:
        problem: The beginning of the error message, with the path.
        advice: What the error message advises.
    """
    try:
        return build()
    except InputError:
        raise  # its message already names the file
    except (*_WRONG_FORM, RuntimeError) as error:  # torch raises RuntimeError
        raise InputError(f"{problem} ({first_line(error, 1000)}). {advice}") from error


_TYPES = {str: "a text", bool: "true or false", int: "a whole number", list: "a list"}


def typed(value: Any, kind: type[T]) -> T:
    """A value of a file, which must be of exactly this type: JSON's true is no number."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not {_TYPES[kind]}")
    return value


def number(value: Any) -> float:
    """A finite number of a file."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{value!r:.40} is not a finite number")
    return float(value)


class JsonFile:
    """What saves itself as JSON, and loads itself again: plans, costs, heads of tasks.

    A subclass is a dataclass that names its format, and builds itself from the content of a file.
    """

    _format: ClassVar[str]
    # What an error message says about a file of another kind.
    _problem: ClassVar[str]
    _indent: ClassVar[int | None] = 2  # None: on one line, for long arrays
    _function: ClassVar[str] = ""  # the public function that loads it, if it is not `load`

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, with null for NaN.

        Raises:
            OutputError: the file cannot be written.
        """
        content = without_nan({"format": self._format, **self._content()})
        return write_json(content, path, self._indent)

    @classmethod
    def load(cls: type[File], path: str | os.PathLike[str]) -> File:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing or holds something else, such as values out of range.
        """
        function = cls._function or f"{cls.__name__}.load"
        advice = f"Give a file that {cls.__name__}.save wrote."
        content = read_object(path, function, advice, cls._problem)

        def build() -> File:
            if content.get("format") != cls._format:
                raise ValueError(f"its format is {content.get('format')!r}, not {cls._format!r}")
            return cls._built(content)

        return build_from(build, f"{function}: {path} {cls._problem}", advice)

    def _content(self) -> dict[str, Any]:
        """What is written: the fields."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def _built(cls: type[File], content: dict[str, Any]) -> File:
        raise NotImplementedError


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is repeated in one object")
    return content


def _whole_number(digits: str) -> int:
    if len(digits.removeprefix("-")) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise ValueError(f"{surrogate!r} is a lone surrogate") from error
