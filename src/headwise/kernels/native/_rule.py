"""A rule in the kernel's words: windows and lengths as numbers, the rest as arrays."""

from functools import reduce
from operator import add, and_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels._bias import Bias, Given
from headwise.kernels._rule import Rule
from headwise.kernels.native._filling import Filling
from headwise.masks import Dense, Mask, Parts, Tile, Window, documents, known

# No window reaches so far, and sums with it stay far from 2**63.
NO_LIMIT = 1 << 40
# Entries of a mask or bias that are written out for the kernel: what one cell of rows may hold.
WRITTEN = 1 << 22
# Beyond its end the kernel may read as many numbers of a table as a strip has queries.
MARGIN = 64
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
    """Why the native kernel does not follow a rule; None: it does."""
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


def give_rule(filling: Filling, rule: Rule) -> None:
    """Fill in everything about a problem but its queries, keys and values."""
    follow(filling, words_of(rule, filling.sizes["T"], filling.sizes["S"]))


def follow(filling: Filling, words: Words) -> None:
    """Fill in everything about a problem but its queries, keys and values.

    Raises:
        ArgumentError: a window is negative, or a mask is not boolean.
        ShapeError: a tensor does not fit the lengths.
    """
    problem = filling.problem
    problem.scale, problem.softcap = words.scale, words.softcap
    problem.left, problem.right = _limit("left", words.left), _limit("right", words.right)
    _give_hidden(filling, words)
    _give_added(filling, words)


def _limit(name: str, n: int | None) -> int:
    if n is None:
        return NO_LIMIT
    if n < 0:
        raise ArgumentError(f"native: {name}={n}. Give a number of keys, 0 or more, or None.")
    return min(n, NO_LIMIT)


def _give_hidden(filling: Filling, words: Words) -> None:
    problem = filling.problem
    B, H, T, S = problem.B, problem.H, problem.T, problem.S
    if words.key_range is not None:
        inside = words.key_range.clamp(0, S).to(torch.int64)
        filling.give("key_range", _spread("key_range", inside, (B, 2)), (B, 2), torch.int64)
    if words.documents is not None:
        if T > S:
            raise ShapeError(f"native: documents of {S} keys for {T} queries. Give no more.")
        _, numbers = torch.unique(words.documents, return_inverse=True)
        numbers = _spread("documents", numbers.to(torch.int32), (B, S))
        filling.give("documents", numbers, (B, S), torch.int32)
    if words.mask is not None:
        if words.mask.dtype != torch.bool:
            raise ArgumentError(f"native: a mask of {words.mask.dtype}. Give booleans.")
        mask = _spread("mask", words.mask, (B, H, T, S), steps=3).view(torch.uint8)
        filling.give("mask", mask, (B, H, T, S), torch.uint8, steps=3)


def _give_added(filling: Filling, words: Words) -> None:
    problem = filling.problem
    B, H, T, S = problem.B, problem.H, problem.T, problem.S
    if words.sinks is not None:
        filling.give("sinks", words.sinks.detach().float().contiguous(), (H,))
    if words.by_distance is not None:
        n = T + S - 1
        _check_fit("by_distance", words.by_distance, (B, H, n))
        padded = torch.nn.functional.pad(words.by_distance.detach().float(), (0, MARGIN))
        table = _spread("by_distance", padded, (B, H, n + MARGIN), steps=2)
        filling.give("by_distance", table, (B, H, n + MARGIN), steps=2)
    if words.bias is not None:
        bias = _spread("bias", words.bias.detach().float(), (B, H, T, S), steps=3)
        filling.give("bias", bias, (B, H, T, S), steps=3)


def _spread(name: str, x: Tensor, shape: tuple[int, ...], steps: int = 0) -> Tensor:
    """Broadcast by steps of 0, but for the axes that are read as dense."""
    _check_fit(name, x, shape)
    x = x.to("cpu").expand(*x.shape[:steps], *shape[steps:])
    if steps == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    return x.expand(shape)


def _check_fit(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    fits = x.ndim == len(shape)
    if not fits or any(n not in (1, size) for n, size in zip(x.shape, shape, strict=True)):
        raise ShapeError(
            f"native: {name} has shape {tuple(x.shape)} instead of {shape}, or ones to broadcast."
        )
