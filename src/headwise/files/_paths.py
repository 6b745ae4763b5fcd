"""Paths that users give."""

import os
from pathlib import Path
from typing import Any

from headwise.errors import ArgumentError


def as_path(function: str, path: Any) -> Path:
    """The path that a function was given.

    Raises:
        ArgumentError: it is neither a string nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{function}: a {type(path).__name__} is no path. Give one as a str or a pathlib.Path."
        )
    return Path(path)
