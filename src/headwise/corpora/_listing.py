"""One rule for every function that takes texts: what counts as a list of texts."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from headwise._display import type_of
from headwise.corpora._text import AnnotatedText
from headwise.errors import ArgumentError, InputError

if TYPE_CHECKING:
    T = TypeVar("T")
    Several: TypeAlias = T | Iterable[T]
else:

    class Several:
        """One item or several; `list_items` refuses everything else at run time."""

        def __class_getitem__(cls, item: Any) -> Any:
            return Any


Texts: TypeAlias = Several[str]
Corpus: TypeAlias = Several[str | AnnotatedText]


def list_texts(who: str, texts: Any, name: str = "texts") -> list[str]:
    """Texts as a list, in order: a string is one text, any other iterable is read once.

    Texts of white space alone are left out.

    Args:
        who: The calling function, named in errors.
        name: The argument, named in errors.
    Raises:
        ArgumentError: the argument is bytes, a mapping, a table or a path, or an item is not a
            string or cannot be encoded.
        InputError: every text is empty or white space.
    """
    return _filled(who, [str(text) for text in _strings(who, name, texts, str)])


def one_text(who: str, text: Any, name: str = "text") -> str:
    """A single text, as it is."""
    if isinstance(text, str):
        [text] = _strings(who, name, text, str)
        return str(text)
    refuse_path(who, name, text)
    raise ArgumentError(f"{who}: {name} is {shortened(text)}, {type_of(text)}. Give one string.")


def list_corpus(who: str, corpus: Any) -> list[AnnotatedText]:
    """Texts with or without annotations as a list of annotated texts.

    Raises:
        ArgumentError: as for `list_texts`.
        InputError: as for `list_texts`.
    """
    listed = _strings(who, "texts", corpus, str, AnnotatedText)
    annotated = [AnnotatedText(str(text)) if isinstance(text, str) else text for text in listed]
    filled = set(_filled(who, [text.text for text in annotated]))
    return [text for text in annotated if text.text in filled]


def list_pairs(who: str, texts: Any, targets: Any = None) -> list[tuple[str, str]]:
    """Each text with its target; None takes each text as its own target.

    Pairs with white space alone on both sides are left out.
    """
    if targets is None:
        return [(text, text) for text in list_texts(who, texts)]
    sides = [_strings(who, "texts", texts, str), _strings(who, "targets", targets, str)]
    if len(sides[0]) != len(sides[1]):
        raise ArgumentError(
            f"{who}: {len(sides[0])} texts and {len(sides[1])} targets. Give a target for each "
            f"text, in the same order."
        )
    pairs = [(str(text), str(target)) for text, target in zip(*sides, strict=True)]
    for number, (text, target) in enumerate(pairs):
        if bool(text.strip()) != bool(target.strip()):
            empty, other = ("target", text) if text.strip() else ("text", target)
            raise InputError(
                f"{who}: the {empty} of pair {number} is empty, beside {shortened(other)}. "
                f"Fill it, or leave the pair out."
            )
    _filled(who, [text for text, _ in pairs])
    return [pair for pair in pairs if pair[0].strip()]


def list_items(who: str, name: str, items: Any, *kinds: type) -> list[Any]:
    """Items of some types as a list, in order; a single item becomes a list of one."""
    expected = f"a {' or '.join(kind.__name__ for kind in kinds)}, or a list of them"
    if isinstance(items, kinds):
        return [items]
    # Iterating a mapping or a data frame gives column names, and a string gives letters.
    not_a_list = isinstance(items, Mapping | str | bytes | bytearray) or hasattr(items, "columns")
    if not_a_list or not isinstance(items, Iterable):
        raise ArgumentError(
            f"{who}: {name} is {shortened(items)}, {type_of(items)}. Give {expected}."
        )
    listed = list(items)
    for place, item in enumerate(listed):
        if not isinstance(item, kinds):
            raise ArgumentError(
                f"{who}: {name}[{place}] is {shortened(item)}, {type_of(item)}. Give {expected}."
            )
    return listed


_READERS = {
    ".csv": "pandas.read_csv(path)[column], or headwise.corpora.read_pairs(path) for pairs",
    ".tsv": "pandas.read_csv(path, sep='\\t')[column]",
    ".parquet": "pandas.read_parquet(path)[column]",
    ".jsonl": "headwise.corpora.read_jsonl(path)",
    ".ndjson": "headwise.corpora.read_jsonl(path)",
    ".json": "json.load(open(path))",
    ".conllu": "headwise.corpora.read_conllu(path)",
    ".txt": "headwise.corpora.read_texts(path)",
}


def refuse_path(who: str, name: str, texts: Any) -> None:
    """Refuse a path, or paths alone, in place of texts.

    A string is one if it names a file, or is a single word that ends like one.
    """
    given = texts if isinstance(texts, list | tuple) else [texts]
    if given and all(_is_path(path, is_alone=path is texts) for path in given):
        reader = _READERS.get(_ending(given[0]), _READERS[".txt"])
        raise ArgumentError(
            f"{who}: {name} is {shortened(texts)}, the path of a file. Read it with {reader}."
        )


def _is_path(text: Any, *, is_alone: bool) -> bool:
    if not isinstance(text, str):
        return isinstance(text, os.PathLike)
    if len(text.split()) == 1 and _ending(text) in _READERS:
        return True
    with suppress(OSError, ValueError):  # a name that is too long, or holds NUL
        return is_alone and os.path.isfile(text)
    return False


def _ending(path: Any) -> str:
    return os.path.splitext(path)[1].lower()


def _strings(who: str, name: str, texts: Any, *kinds: type) -> list[Any]:
    refuse_path(who, name, texts)
    listed = list_items(who, name, texts, *kinds)
    for place, item in enumerate(listed):
        text = item if isinstance(item, str) else item.text
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"{who}: {name}[{place}] holds {text[error.start]!r} at {error.start}, half of a "
                f"surrogate pair, which no tokenizer encodes. Decode the text again, or leave it "
                f"out."
            ) from error
    return listed


def _filled(who: str, texts: list[str]) -> list[str]:
    filled = [text for text in texts if text.strip()]
    if not filled:
        raise InputError(f"{who}: {len(texts)} texts hold no token. Give texts with words.")
    return filled
