"""What counts as a list of texts: one rule for every function that takes texts."""

from collections.abc import Iterable, Mapping
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from headwise.corpora._text import AnnotatedText
from headwise.errors import ArgumentError, InputError

if TYPE_CHECKING:
    T = TypeVar("T")
    Several: TypeAlias = T | Iterable[T]
else:

    class Several:
        """One item or several; what else is given at run time, `list_items` refuses by name."""

        def __class_getitem__(cls, item: Any) -> Any:
            return Any


Texts: TypeAlias = Several[str]
Corpus: TypeAlias = Several[str | AnnotatedText]


def list_texts(who: str, texts: Any, name: str = "texts") -> list[str]:
    """Texts as a list, in order: a string is one text, any other iterable is read once.

    Texts of white space alone are left out.

    Args:
        who: The function that takes them, for its errors.
        name: The argument that holds them.
    Raises:
        ArgumentError: they are no texts: bytes, a mapping or table (its names would be read), a
            path, or something in them is not a string or cannot be encoded.
        InputError: none of them has more than white space.
    """
    return _filled(who, [str(text) for text in _strings(who, name, texts, str)])


def list_corpus(who: str, corpus: Any, name: str = "corpus") -> list[AnnotatedText]:
    """The same of texts with or without annotations.

    Raises:
        ArgumentError: as for `list_texts`.
        InputError: as for `list_texts`.
    """
    found = _strings(who, name, corpus, str, AnnotatedText)
    annotated = [AnnotatedText(str(one)) if isinstance(one, str) else one for one in found]
    filled = set(_filled(who, [one.text for one in annotated]))
    return [one for one in annotated if one.text in filled]


def list_pairs(who: str, texts: Any, targets: Any = None) -> list[tuple[str, str]]:
    """Each text with its target; None takes each text as its own target.

    Pairs of which both sides are white space alone are left out.

    Raises:
        ArgumentError: as for `list_texts`, or there are more of one than of the other.
        InputError: as for `list_texts`, or a text has an empty target, or the other way round.
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
    """Items of some kinds as a list, in order; a single one is a list of it.

    Raises:
        ArgumentError: something is of another kind.
    """
    wanted = f"a {' or '.join(kind.__name__ for kind in kinds)}, or a list of them"
    if isinstance(items, kinds):
        return [items]
    # A mapping or a data frame would fall apart into the names of its columns, a string into
    # letters.
    whole = isinstance(items, Mapping | str | bytes | bytearray) or hasattr(items, "columns")
    if whole or not isinstance(items, Iterable):
        raise ArgumentError(
            f"{who}: {name} is {shortened(items)}, a {type(items).__name__}. Give {wanted}."
        )
    listed = list(items)
    for place, item in enumerate(listed):
        if not isinstance(item, kinds):
            raise ArgumentError(
                f"{who}: {name}[{place}] is {shortened(item)}, a {type(item).__name__}. "
                f"Give {wanted}."
            )
    return listed


def _strings(who: str, name: str, texts: Any, *kinds: type) -> list[Any]:
    listed = list_items(who, name, texts, *kinds)
    for place, text in enumerate(listed):
        _check_encodable(f"{who}: {name}[{place}]", text if isinstance(text, str) else text.text)
    return listed


def _check_encodable(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{where} holds {text[error.start]!r} at {error.start}, half of a surrogate pair, "
            f"which no tokenizer reads. Decode the text anew, or leave it out."
        ) from error


def _filled(who: str, texts: list[str]) -> list[str]:
    filled = [text for text in texts if text.strip()]
    if not filled:
        raise InputError(f"{who}: {len(texts)} texts hold no token. Give texts with words.")
    return filled
