"""A rule in a kernel's words: windows and lengths as numbers, the rest as arrays."""

from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.kernels._bias import Bias, Given
from headwise.kernels._rule import Rule
from headwise.masks import Dense, Mask, Parts, Tile, Window, documents, known

# Entries of a mask or bias that are written out for a kernel: what one cell of rows may hold.
WRITTEN = 1 << 22
_EVERYWHERE = Window(None, None)
_CPU = torch.device("cpu")


class Words(NamedTuple):
    """A rule as numbers and tensors, which is how it goes through an operator.

    Query `i` of `T` stands at key `i + S - T`. Axes of one entry broadcast. A query sees what
    all of these show it; None shows everything, and adds nothing.
    """

    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    left: int | None = None  # keys on each side of a query's own
    right: int | None = None
    key_range: Int[Tensor, "#B 2"] | None = None  # the first key, and one past the last
    documents: Int[Tensor, "#B S"] | None = None
    mask: Bool[Tensor, "#B #H #T #S"] | None = None
    bias: Float[Tensor, "#B #H #T #S"] | None = None
    by_distance: Float[Tensor, "#B #H n"] | None = None  # at S - 1 + i - j
    sinks: Float[Tensor, " H"] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self[4:] if x is not None]


def cannot_follow(rule: Rule, T: int, S: int) -> str | None:
    """Why a rule is not put into words; None: it is."""
    if rule.needs_double:
        return f"at scale={rule.scale:g} logits need float64, which is left to the rows"
    if rule.bias is None and (rule.visible is None or isinstance(rule.visible, Window)):
        return None
    parts = Parts.of(rule.visible, T, S)
    for name, part, given in (
        ("mask", parts.rest, parts.whole),
        ("bias", *_given(rule.bias)),
    ):
        if part is None or given:
            continue
        texts, heads = part.batch
        if not known(texts * heads * T * S <= WRITTEN):
            return f"a {name} of {texts} x {heads} x {T} x {S} entries would have to be written out"
    return None


def _given(bias: Bias | None) -> tuple[Bias | None, bool]:
    """What of a bias has to be an array, and whether it is one already."""
    parts = [part for part in bias.parts if not part.by_distance] if bias is not None else []
    if not parts:
        return None, False
    one = parts[0]
    for part in parts[1:]:
        one = one + part
    return one, isinstance(one, Given)


def words_of(rule: Rule, T: int, S: int, device: torch.device = _CPU) -> Words:
    """A rule in a kernel's words, for these lengths. Of numbers nothing is read."""
    near = rule.visible if isinstance(rule.visible, Window) else _EVERYWHERE
    words = Words(rule.scale, rule.softcap or 0.0, near.left, near.right, sinks=rule.sinks)
    if rule.visible is not None and rule.visible is not near:
        parts = Parts.of(rule.visible, T, S)
        words = words._replace(
            left=parts.window.left,
            right=parts.window.right,
            key_range=parts.key_range,
            documents=parts.documents,
            mask=parts.dense(T, S, device),
        )
    if rule.bias is None:
        return words
    tables = [_table(part, T, S, device) for part in rule.bias.parts if part.by_distance]
    given, _ = _given(rule.bias)
    return words._replace(
        bias=None if given is None else given.tile(Tile.whole(T, S, device)),
        by_distance=sum(tables[1:], tables[0]) if tables else None,
    )


def _table(bias: Bias, T: int, S: int, device: torch.device) -> Float[Tensor, "#B #H n"]:
    """A bias by distance alone: entry `S - 1 + i - j` is that of query `i` and key `j`."""
    n = T + S - 1
    line = bias.tile(Tile(n, n, slice(S - 1, S), slice(0, n), device))
    return line[:, :, 0].flip(-1)


def rule_of(words: Words, T: int, S: int) -> Rule:
    """The rule that some words say, for kernels that do not follow these."""
    masks: list[Mask] = [Window(words.left, words.right)]
    at = torch.arange(S)
    if words.key_range is not None:
        start, stop = words.key_range[:, :1], words.key_range[:, 1:]
        masks.append(Dense(((at >= start) & (at < stop))[:, None, None]))
    if words.documents is not None:
        masks.append(documents(words.documents))
    if words.mask is not None:
        masks.append(Dense(words.mask))
    biases: list[Bias] = [] if words.bias is None else [Given(words.bias)]
    if words.by_distance is not None:
        away = torch.arange(T)[:, None] - at + S - 1  # T S
        biases.append(Given(words.by_distance[..., away]))
    return Rule(
        scale=words.scale,
        visible=reduce(and_, masks).simplify(T, S),
        bias=reduce(add, biases) if biases else None,
        softcap=words.softcap or None,
        sinks=words.sinks,
    )
