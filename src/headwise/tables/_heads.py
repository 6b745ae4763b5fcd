"""The address of a head: `L5.H3`, or `decoder.cross.L0.H3` in a model with several stacks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from typing_extensions import TypeIs

from headwise.errors import ArgumentError, HeadError

_PART = r"[a-z_][a-z0-9_]*"
_NUMBER = r"\d{1,9}"
_NAME = re.compile(
    rf"(?:(?P<stack>{_PART}(?:\.{_PART})*)\.)?L(?P<layer>{_NUMBER})\.H(?P<head>{_NUMBER})", re.ASCII
)


@dataclass(frozen=True, order=True)
class Head:
    """The address of one query head: its stack, its layer and its index in the layer.

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
        match = _NAME.fullmatch(name)
        if match is None:
            raise HeadError(f"Head.parse: {name!r} names no head. Write it like 'L5.H3'.")
        return cls(match["stack"] or "", int(match["layer"]), int(match["head"]))


HeadLike = Head | str | tuple[int, int]
HeadsLike = HeadLike | Iterable[HeadLike] | Mapping[int, Iterable[int]]


def resolve_heads(
    heads: HeadsLike, existing: Iterable[Head], *, measured: bool = False
) -> list[Head]:
    """Resolve head names of any form to existing addresses, in the same order.

    A pair `(5, 3)` or a mapping `{5: [3]}` is enough if the model has one stack.

    Args:
        measured: Whether these are the heads of a result, which may not be all of the model.
    """
    known = set(existing)
    among = " among those that were measured" if measured else ""
    resolved = [_resolve(head, known, among) for head in list_heads(heads)]
    for head in resolved:
        if resolved.count(head) > 1:
            raise HeadError(f"heads: {head} is named twice. Name each head once.")
    return resolved


def list_heads(heads: HeadsLike) -> list[HeadLike]:
    """The names of heads in any form, one by one; they may not exist."""
    if is_head(heads):
        return [heads]
    try:
        if isinstance(heads, Mapping):
            return [(layer, head) for layer, heads in heads.items() for head in heads]
        return list(heads)
    except TypeError as error:
        if hasattr(heads, "importance"):
            raise HeadError(
                f"heads: {type(heads).__name__} of {len(heads.importance)} heads choose none. Give "
                f"hw.plan(scores, remove=0.2), or heads by name."
            ) from error
        raise HeadError(
            f"heads: {heads!r} names no heads. Write 'L5.H3', (5, 3), a list of either, or "
            f"{{5: [3]}}."
        ) from error


def named_heads(caller: str, heads: HeadsLike | None, existing: Sequence[Head]) -> list[Head]:
    """The existing heads that an argument names; None is all of them.

    Raises:
        ArgumentError: it names none.
    """
    named = [*existing] if heads is None else resolve_heads(heads, existing)
    if not named:
        raise ArgumentError(f"{caller}: heads={heads!r} names none of {len(existing)}. Name some.")
    return named


def is_head(heads: object) -> TypeIs[HeadLike]:
    """Whether this names one head, and not several."""
    whole = isinstance(heads, tuple) and all(isinstance(part, Integral) for part in heads)
    return isinstance(heads, Head | str) or (isinstance(heads, tuple) and len(heads) == 2 and whole)


def _resolve(head: HeadLike, known: set[Head], among: str) -> Head:
    if isinstance(head, str):
        head = Head.parse(head)
    if isinstance(head, Head):
        matches = [existing for existing in known if existing == head]
    elif not isinstance(head, Iterable):
        raise HeadError(f"heads: {head!r} names no head. Write 'L5.H3' or (5, 3).")
    else:
        matches = [existing for existing in known if (existing.layer, existing.head) == tuple(head)]
    if len(matches) > 1:
        names = ", ".join(str(existing) for existing in sorted(matches))
        raise HeadError(f"heads: {head} could be {names}. Name the stack too.")
    if not matches:
        ends = f"There are {len(known)}, from {min(known)} to {max(known)}." if known else ""
        raise HeadError(
            f"heads: there is no head {head}{among}. {ends or 'There are no heads at all.'}"
        )
    return matches[0]


def address_columns(heads: Sequence[Head]) -> dict[str, object]:
    """The columns that every table of heads begins with: name, stack, layer, head."""
    return {
        "name": [str(head) for head in heads],
        "stack": [head.stack for head in heads],
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
    }
