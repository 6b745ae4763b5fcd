"""The column sizes that the footer of a Parquet file declares.

pyarrow ends the process at some damaged footers when it is asked for a column chunk. This file
decodes the same numbers from the footer itself, which is one struct in Thrift's compact protocol.

Source:
    The Parquet format, `FileMetaData` in parquet.thrift; the Thrift compact protocol.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC, _DEPTH = b"PAR1", 32
_BYTE_ARRAY = 6  # the physical type of texts
# The types of the compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class ColumnChunk(NamedTuple):
    """A column in one row group."""

    path: str
    is_text: bool
    n_values: int
    n_bytes: int  # uncompressed


def column_chunks(path: Path) -> list[ColumnChunk]:
    """The column chunks of all row groups.

    Raises:
        ValueError: the file does not end in a footer that can be decoded.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - 8
        file.seek(max(0, end))
        tail = file.read()
        size = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or size > end:
            raise ValueError("no footer")
        file.seek(end - size)
        content = file.read(size)
    try:
        footer = _Decoder(content).struct(0)
        return [_chunk(column[3]) for group in footer[4] for column in group[1]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"a damaged footer ({error})") from error


def _chunk(about: dict[int, Any]) -> ColumnChunk:
    path = b".".join(about[3]).decode()
    return ColumnChunk(path, about[1] == _BYTE_ARRAY, int(about[5]), int(about[6]))


class _Decoder:
    """Decodes structs into dictionaries by field number."""

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._integer()
            fields[number] = self._value(header & 15, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in _INTEGERS:
            return self._integer()
        if kind in (_BYTE, _DOUBLE):
            return self._bytes(1 if kind == _BYTE else 8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_LIST, _SET):
            return self._list(depth)
        raise ValueError(f"type {kind}")  # Parquet's metadata has no maps

    def _list(self, depth: int) -> list[Any]:
        header = self._byte()
        size = header >> 4 if header >> 4 < 15 else self._varint()
        kind = header & 15
        if kind in (_TRUE, _FALSE):  # in a list, one byte each
            kind = _BYTE
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        return [self._value(kind, depth + 1) for _ in range(size)]

    def _integer(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def _byte(self) -> int:
        byte = self._content[self._position]
        self._position += 1
        return byte

    def _bytes(self, size: int) -> bytes:
        if size > len(self._content) - self._position:
            raise ValueError("cut short")
        self._position += size
        return self._content[self._position - size : self._position]
