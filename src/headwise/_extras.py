"""Packages: those that an extra installs, what their tokenizers need, and the versions of ours."""

import sys
from copy import copy
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

from headwise.errors import MissingPackageError


def require(module: str, extra: str, function: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and broken
        raise MissingPackageError(
            f"{function}: {package} is not installed. Install it with the extra: "
            f"pip install 'headwise[{extra}]'."
        ) from error


@cache  # it looks through the installed packages, which takes half a millisecond of each table
def _version_of(package: str) -> str:
    return version(package)


def versions() -> dict[str, str]:
    """The versions of the packages that compute every result."""
    return {package: _version_of(package) for package in ("headwise", "torch")}


def is_tokenizer_of_rust(tokenizer: Any) -> bool:
    """Whether it is a `tokenizers.Tokenizer` rather than one of transformers.

    This does not import that package; where it was not imported, the answer is False.
    """
    tokenizers = sys.modules.get("tokenizers")
    return tokenizers is not None and isinstance(tokenizer, tokenizers.Tokenizer)


def untruncated(tokenizer: Any) -> Any:
    """The tokenizer without truncation and padding of its own: every text is read through it.

    A copy if it has any, so that the caller's stays as it is. Texts that are too long are cut into
    pieces from their beginning on.
    """
    if is_tokenizer_of_rust(tokenizer):
        if tokenizer.truncation or tokenizer.padding:
            tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
    elif getattr(tokenizer, "truncation_side", "right") != "right":
        tokenizer = copy(tokenizer)
        tokenizer.truncation_side = "right"
    return tokenizer
