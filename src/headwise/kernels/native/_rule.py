"""What the kernel is told of a rule: its words, as fields of a problem."""

import torch
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels._rule import Rule
from headwise.kernels._words import Words, words_of
from headwise.kernels.native._filling import Filling

# No window reaches so far, and sums with it stay far from 2**63.
NO_LIMIT = 1 << 40
# Beyond its end the kernel may read as many numbers of a table as a strip has queries.
MARGIN = 64


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
        inside = words.key_range.to(torch.int64).clamp(0, S)
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
