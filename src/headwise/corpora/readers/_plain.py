"""Plain text files: a list of texts, nothing known about them."""

import os
import re

from headwise.corpora.readers._file import text_of
from headwise.errors import InputError


def read_texts(path: str | os.PathLike[str]) -> list[str]:
    """Read the texts of a UTF-8 file: its paragraphs, or its lines where it has no blank line.

    A paragraph keeps its line breaks. A byte order mark is dropped, blank lines at either end
    of the file separate nothing.

    Raises:
        InputError: the file cannot be read, is not UTF-8, or holds only white space.
    """
    text = text_of(path, "read_texts")
    # Not splitlines(): form feeds and the like do not end a line in a text file.
    lines = [line.rstrip() for line in re.split(r"\r\n|\r|\n", text)]
    body = "\n".join(lines).strip("\n")
    if not body:
        raise InputError(
            f"read_texts: {path} holds no text ({os.path.getsize(path)} bytes). Name a text file."
        )
    return re.split(r"\n{2,}" if "\n\n" in body else r"\n", body)
