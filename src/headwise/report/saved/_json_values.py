"""Values of a JSON file, checked: a file may hold a value of any type in any place."""

from collections.abc import Mapping
from typing import Any


def text_of(value: Any) -> str:
    """The value if it is a text.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a text")
    return value


def texts_of(values: Any) -> tuple[str, ...]:
    """The values if they are a list of texts.

    Raises:
        TypeError: they are something else.
    """
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.40} is not a list")
    return tuple(map(text_of, values))


def facts_of(values: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The values if they are texts and numbers by name.

    Raises:
        TypeError: one of them is something else.
    """
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            raise TypeError(f"{name} is {value!r:.40}, neither a text nor a number")
    return dict(values)
