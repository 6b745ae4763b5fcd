"""Bytes of a file as UTF-8 text; files of other kinds are recognized by their first bytes."""

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
