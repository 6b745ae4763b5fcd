"""Text from models and corpora, with invisible characters made visible."""

import unicodedata

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# Below these a number needs four decimals, and a power of ten.
_SMALL, _TINY = 0.001, 0.0001
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
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
    if not number or abs(number) >= _SMALL:
        return f"{number:.3f}"
    if abs(number) >= _TINY:
        return f"{number:.4f}"
    factor, power = f"{number:.0e}".split("e")
    return f"{factor}·10{str(int(power)).translate(_RAISED)}"


def probability(p: float) -> str:
    """A p-value with two significant digits; a small one as a power of ten."""
    return digits(p) if p < _TINY else f"{p:.2g}"


def _symbol(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in _INVISIBLE:
        return f"‹{ord(character):04X}›"
    return character
