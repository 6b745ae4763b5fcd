"""Text from models and corpora, made visible: it can hold anything."""

import unicodedata

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_NAMED = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}


def visible(text: str) -> str:
    """Replace what cannot be seen or would rearrange the page: control and direction marks.

    Line breaks and the like get their pictures, other marks their code point: `‹200F›`.
    """
    return "".join(_picture(character) for character in text)


def visible_token(token: str) -> str:
    """The same for a token, with spaces at its ends, or nothing at all, made visible too."""
    if not token:
        return "∅"
    body = token.strip(" ")
    if not body:
        return "␣" * len(token)
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(token.rstrip(" "))
    # A combining mark would climb onto whatever stands before it.
    carrier = "◌" if unicodedata.combining(body[0]) else ""
    return "␣" * before + carrier + visible(body) + "␣" * after


def _picture(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _INVISIBLE:
        return f"‹{ord(character):04X}›"
    return character
