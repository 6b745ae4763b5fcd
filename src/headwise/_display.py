"""Numbers with their nouns, the nearest of some names, and text that is safe to print."""

from collections.abc import Iterable
from difflib import get_close_matches

BEFOREHAND = " named beforehand"
"""Of hypotheses: not chosen from what was measured, so that p is adjusted for them alone."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun in the right form: `1 text`, `1,200 texts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def type_of(value: object) -> str:
    """The type of a value with its article: `an int`, `a Tensor`."""
    name = type(value).__name__
    return f"{'an' if name.startswith(('nd', *'aeiouAEIOU')) else 'a'} {name}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of some names as a question with a space before it; empty if none is near."""
    by_lower = {known.lower(): known for known in names}  # to difflib, It and it are far apart
    close = get_close_matches(name.lower(), by_lower, 1)
    return f" Did you mean {by_lower[close[0]]}?" if close else ""


def measured_on(model: str, what: str, digest: str, seed: int, version: str) -> str:
    """What a result was measured on, as one of its notes: model, inputs, seed and version."""
    return f"model {model}, {what} {digest[:16]}, seed {seed}, headwise {version}"


def first_line(error: BaseException, most: int = 160) -> str:
    """The first line of an error, to stand in another message; its type if it says nothing.

    A first line that ends in a colon only announces the next one, which then follows it.
    """
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    said = f"{first} {more[0].strip()}" if more and first.endswith(":") else first
    if len(said) > most:
        said = f"{said[:most].rpartition(' ')[0] or said[:most]} …"
    return said.rstrip(" .")


def printable(text: str) -> str:
    """Text with unprintable characters replaced, safe to print to a terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
