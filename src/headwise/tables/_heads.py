"""How a head is named: `L5.H3`, or `decoder.cross.L0.H3` where a model has several stacks."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral

from typing_extensions import TypeIs

from headwise.errors import HeadError

_PART = r"[a-z_][a-z0-9_]*"
_NUMBER = r"\d{1,9}"
_NAME = re.compile(
    rf"(?:(?P<stack>{_PART}(?:\.{_PART})*)\.)?L(?P<layer>{_NUMBER})\.H(?P<head>{_NUMBER})", re.ASCII
)


@dataclass(frozen=True, order=True)
class Head:
    """The address of one query head: its stack, its layer and its place in the layer.

    Layers and heads count from 0. A model with one attention stack has the stack `""`.
    """

    stack: str
    layer: int
    head: int

    def __str__(self) -> str:
        place = f"L{self.layer}.H{self.head}"
        return f"{self.stack}.{place}" if self.stack else place

    @classmethod
    def parse(cls, name: str) -> "Head":
        """Read a name such as `L5.H3`.

        Raises:
            HeadError: the name is not of that form.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise HeadError(f"Head.parse: {name!r} names no head. Write it like 'L5.H3'.")
        return cls(found["stack"] or "", int(found["layer"]), int(found["head"]))


HeadLike = Head | str | tuple[int, int]
HeadsLike = HeadLike | Iterable[HeadLike] | Mapping[int, Iterable[int]]


def resolve_heads(wanted: HeadsLike, existing: Iterable[Head]) -> list[Head]:
    """Turn any way of naming heads into addresses that exist, in the order given.

    A pair `(5, 3)` or a mapping `{5: [3]}` is enough where the model has one stack.

    Raises:
        HeadError: a head does not exist, is named twice, or a pair could mean several.
    """
    known = set(existing)
    heads = [_resolve(one, known) for one in _each(wanted)]
    for head in heads:
        if heads.count(head) > 1:
            raise HeadError(f"heads: {head} is named twice. Name each head once.")
    return heads


def _each(wanted: HeadsLike) -> list[HeadLike]:
    if isinstance(wanted, Head | str) or _is_pair(wanted):
        return [wanted]
    try:
        if isinstance(wanted, Mapping):
            return [(layer, head) for layer, heads in wanted.items() for head in heads]
        return list(wanted)
    except TypeError as error:
        raise HeadError(
            f"heads: {wanted!r} names no heads. Write 'L5.H3', (5, 3), a list of either, or "
            f"{{5: [3]}}."
        ) from error


def _is_pair(wanted: object) -> TypeIs[tuple[int, int]]:
    return (
        isinstance(wanted, tuple)
        and len(wanted) == 2
        and all(isinstance(part, Integral) for part in wanted)
    )


def _resolve(one: HeadLike, known: set[Head]) -> Head:
    if isinstance(one, str):
        one = Head.parse(one)
    if isinstance(one, Head):
        matches = [head for head in known if head == one]
    elif not isinstance(one, Iterable):
        raise HeadError(f"heads: {one!r} names no head. Write 'L5.H3' or (5, 3).")
    else:
        matches = [head for head in known if (head.layer, head.head) == tuple(one)]
    if len(matches) > 1:
        names = ", ".join(str(head) for head in sorted(matches))
        raise HeadError(f"heads: {one} could be {names}. Name the stack too.")
    if not matches:
        raise HeadError(f"heads: there is no head {one}. {_choices(known)}")
    return matches[0]


def _choices(known: set[Head]) -> str:
    if not known:
        return "There are no heads at all."
    first, last = min(known), max(known)
    return f"There are {len(known)}, from {first} to {last}."
