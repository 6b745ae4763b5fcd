"""Numbers with their nouns, and text that is safe to print."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun in the right form: `1 text`, `1,200 texts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def printable(text: str) -> str:
    """Text with unprintable characters replaced, safe to print to a terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )
