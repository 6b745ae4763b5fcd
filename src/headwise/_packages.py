"""Packages that are installed only with an extra."""

from importlib import import_module
from typing import Any

from headwise.errors import MissingPackageError


def require(module: str, extra: str, function: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{function}: {package} is not installed. Install it with the extra: "
            f"pip install 'headwise[{extra}]'."
        ) from error
