"""Numbers with their nouns, and text that is safe to print."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the singular where there is one: `1 text`, `1,200 texts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def printable(text: str) -> str:
    """Text of a corpus or a user, without what would rearrange a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
