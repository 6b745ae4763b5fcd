"""Text from models and corpora, with invisible characters made visible."""

import unicodedata

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_NAMED = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def visible(text: str) -> str:
    """Replace characters that are invisible or would rearrange the page, such as direction marks.

    Line breaks and control characters become symbols, others their code point: `‹200F›`.
    """
    return "".join(_symbol(character) for character in text)


def visible_token(token: str) -> str:
    """The same for a token; spaces at its ends and an empty token become visible too."""
    if not token:
        return "∅"
    body = token.strip(" ")
    if not body:
        return "␣" * len(token)
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(token.rstrip(" "))
    # A combining mark would attach to the character before it.
    carrier = "◌" if unicodedata.combining(body[0]) else ""
    return "␣" * before + carrier + visible(body) + "␣" * after


def digits(number: float) -> str:
    """A number with three decimals, or more if it would be 0.000; a dash for NaN."""
    if number != number:
        return "–"
    if number and abs(number) < 0.001:
        return f"{number:.0e}" if abs(number) < 1e-4 else f"{number:.4f}"
    return f"{number:.3f}"


def _symbol(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _INVISIBLE:
        return f"‹{ord(character):04X}›"
    return character
