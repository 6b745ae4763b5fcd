"""The records of a text file that begin in a range of its bytes: lines, or paragraphs.

Every record belongs to exactly one of the ranges that a file is cut into: to the one in which it
begins. No range needs to know another.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from headwise.errors import InputError
from headwise.files import kind_of

_WHO = "corpus"
_BOM = b"\xef\xbb\xbf"
# A longer line or paragraph is refused, so that memory stays bounded.
LONGEST_RECORD = 2**28
# Bytes that are read at once to find the beginning of a line.
_BLOCK = 2**16
# Bytes after which a file without a blank line is one of lines.
_SCANNED = 2**20
# Bytes by which a file of another kind is recognised.
_KNOWN_BY = 16


@dataclass(frozen=True)
class Record:
    """A line or a paragraph as stored, without the line break at its end.

    Attributes:
        path: The file.
        offset: The byte at which the record begins.
        data: Its bytes, without a byte order mark.
    """

    path: str
    offset: int
    data: bytes

    def text(self) -> str:
        """The decoded record, its lines without white space at their ends.

        Raises:
            InputError: it is not UTF-8.
        """
        try:
            lines = self.data.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            if kind := kind_of(self._beginning_of_file()):
                raise InputError(
                    f"{_WHO}: {self.path} is {kind}, not UTF-8 text. Name files of plain text."
                ) from error
            raise InputError(
                f"{_WHO}: {self.path} is not UTF-8 (byte {self.offset + error.start} is "
                f"0x{self.data[error.start]:02x}). Convert it, for example with iconv."
            ) from error
        return "\n".join(line.rstrip() for line in lines)

    def _beginning_of_file(self) -> bytes:
        with open_data(self.path) as file:
            return file.read(_KNOWN_BY)

    def line_number(self) -> int:
        """The number of the record's first line in the file, from 1."""
        with open_data(self.path) as file:
            return 1 + sum(block.count(b"\n") for block in _blocks_before(file, self.offset))


def open_data(path: str) -> BinaryIO:
    """A file opened for reading.

    Raises:
        InputError: it cannot be opened.
    """
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(
            f"{_WHO}: {path} cannot be read ({error.strerror}). Name a file that exists."
        ) from error


def lines_between(path: str, start: int, stop: int) -> Iterator[Record]:
    """The lines that begin in [start, stop), without blank ones."""
    with open_data(path) as file:
        _go_to_line(file, start)
        for offset, line in _lines(file, path):
            if offset >= stop:
                return
            if not is_blank(line):
                yield Record(path, offset, line.rstrip(b"\r\n"))


def paragraphs_between(path: str, start: int, stop: int) -> Iterator[Record]:
    """The paragraphs that begin in [start, stop): lines in a row that are not blank."""
    with open_data(path) as file:
        is_inside = _go_behind_line_before(file, path, start)
        first = size = 0
        lines: list[bytes] = []
        for offset, line in _lines(file, path):
            if is_blank(line):
                if lines:
                    yield Record(path, first, b"".join(lines).rstrip(b"\r\n"))
                is_inside, lines, size = False, [], 0
            elif not is_inside and not lines and offset >= stop:
                return
            elif not is_inside:
                first = first if lines else offset
                lines.append(line)
                size += len(line)
                _check_size(size, path, first)
            if is_inside and offset >= stop:
                return
        if lines:
            yield Record(path, first, b"".join(lines).rstrip(b"\r\n"))


def has_paragraphs(path: str) -> bool:
    """Whether a blank line lies between two that are not, in the file's first MiB."""
    text_before = gap_after_text = False
    with open_data(path) as file:
        for offset, line in _lines(file, path):
            if offset > _SCANNED:
                return False
            if is_blank(line):
                gap_after_text = text_before
            elif gap_after_text:
                return True
            else:
                text_before = True
    return False


def is_blank(line: bytes) -> bool:
    """Whether a line holds only white space, by the rules of Unicode."""
    bare = line.strip()
    if not bare or 0x21 <= bare[0] < 0x7F:
        return not bare
    return not line.decode("utf-8", "replace").strip()


def _lines(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """The lines from the current position on, with the byte at which each begins."""
    offset = file.tell()
    while line := file.readline(LONGEST_RECORD + 1):
        _check_size(len(line), path, offset)
        yield offset, line.removeprefix(_BOM) if offset == 0 else line
        offset += len(line)


def _check_size(size: int, path: str, offset: int) -> None:
    if size > LONGEST_RECORD:
        raise InputError(
            f"{_WHO}: {path} has a text of more than {LONGEST_RECORD:,} bytes at byte {offset:,}. "
            f"Cut it into texts."
        )


def _go_to_line(file: BinaryIO, position: int) -> None:
    """Go to the first line that begins at `position` or after it."""
    file.seek(max(0, position - 1))
    while position > 0 and (part := file.readline(_BLOCK)) and not part.endswith(b"\n"):
        pass


def _go_behind_line_before(file: BinaryIO, path: str, position: int) -> bool:
    """Go to the first line that begins at `position` or after it.

    Returns:
        Whether the line before it is not blank, so that it continues a paragraph.
    """
    if position == 0:
        return False
    end = position - 1
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        line_break = file.read(end - begin).rfind(b"\n")
        if line_break >= 0:
            end = begin + line_break + 1
            break
        end = begin
    file.seek(end)
    line = file.readline(LONGEST_RECORD + 1)
    _check_size(len(line), path, end)
    return not is_blank(line.removeprefix(_BOM) if end == 0 else line)


def _blocks_before(file: BinaryIO, stop: int) -> Iterator[bytes]:
    """The bytes before a position, in blocks."""
    edges = [*range(0, stop, _BLOCK), stop]
    return (file.read(after - before) for before, after in pairwise(edges))


def size_of(path: str) -> int:
    """The size of a file in bytes.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise InputError(
            f"{_WHO}: {path} cannot be read ({error.strerror}). Name a file that exists."
        ) from error
