"""Texts in groups that fit into memory."""

from collections.abc import Iterable, Iterator

from headwise.corpora._text import AnnotatedText

# The most texts, and the most characters, that are read and tokenized together. Texts of similar
# length among them share a batch.
_TEXTS, _CHARACTERS = 1024, 2**21


def windows(texts: Iterable[AnnotatedText]) -> Iterator[list[AnnotatedText]]:
    """Texts in groups that fit into memory, in order."""
    window: list[AnnotatedText] = []
    characters = 0
    for text in texts:
        window.append(text)
        characters += len(text.text)
        if len(window) >= _TEXTS or characters >= _CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window
