"""A lowered rule as fields of a problem."""

import torch
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels.native._builder import ProblemBuilder
from headwise.kernels.spec import AttentionRule, Lowered, lower

# Wider than any window, and sums with it do not overflow 64 bits.
NO_LIMIT = 1 << 40
# How many elements the kernel may read beyond the end of a table: a tile of queries.
MARGIN = 64


def add_rule(builder: ProblemBuilder, rule: AttentionRule) -> None:
    """Add a rule to a problem."""
    add_lowered(builder, lower(rule, builder.sizes["T"], builder.sizes["S"]))


def add_lowered(builder: ProblemBuilder, lowered: Lowered) -> None:
    """Add a lowered rule to a problem.

    Raises:
        ArgumentError: a window is negative, or a mask is not boolean.
        ShapeError: a tensor does not fit the lengths.
    """
    problem = builder.problem
    problem.scale, problem.softcap = lowered.scale, lowered.softcap
    problem.left, problem.right = _limit("left", lowered.left), _limit("right", lowered.right)
    _add_masks(builder, lowered)
    _add_biases(builder, lowered)


def _limit(name: str, n: int | None) -> int:
    if n is None:
        return NO_LIMIT
    if n < 0:
        raise ArgumentError(f"native: {name}={n}. Give a number of keys, 0 or more, or None.")
    return min(n, NO_LIMIT)


def _add_masks(builder: ProblemBuilder, lowered: Lowered) -> None:
    problem = builder.problem
    B, H, T, S = problem.B, problem.H, problem.T, problem.S
    if lowered.key_range is not None:
        inside = lowered.key_range.to(torch.int64).clamp(0, S)
        builder.add_input("key_range", _spread("key_range", inside, (B, 2)), (B, 2), torch.int64)
    if lowered.documents is not None:
        if T > S:
            raise ShapeError(f"native: documents of {S} keys for {T} queries. Give no more.")
        _, numbers = torch.unique(lowered.documents, return_inverse=True)
        numbers = _spread("documents", numbers.to(torch.int32), (B, S))
        builder.add_input("documents", numbers, (B, S), torch.int32)
    if lowered.mask is not None:
        if lowered.mask.dtype != torch.bool:
            raise ArgumentError(f"native: a mask of {lowered.mask.dtype}. Give booleans.")
        mask = _spread("mask", lowered.mask, (B, H, T, S), strided_axes=3).view(torch.uint8)
        builder.add_input("mask", mask, (B, H, T, S), torch.uint8, strided_axes=3)


def _add_biases(builder: ProblemBuilder, lowered: Lowered) -> None:
    problem = builder.problem
    B, H, T, S = problem.B, problem.H, problem.T, problem.S
    if lowered.sinks is not None:
        builder.add_input("sinks", lowered.sinks.detach().float().contiguous(), (H,))
    if lowered.by_distance is not None:
        n = T + S - 1
        _check_fit("by_distance", lowered.by_distance, (B, H, n))
        padded = torch.nn.functional.pad(lowered.by_distance.detach().float(), (0, MARGIN))
        table = _spread("by_distance", padded, (B, H, n + MARGIN), strided_axes=2)
        builder.add_input("by_distance", table, (B, H, n + MARGIN), strided_axes=2)
    if lowered.bias is not None:
        bias = _spread("bias", lowered.bias.detach().float(), (B, H, T, S), strided_axes=3)
        builder.add_input("bias", bias, (B, H, T, S), strided_axes=3)


def _spread(name: str, x: Tensor, shape: tuple[int, ...], strided_axes: int = 0) -> Tensor:
    """Broadcast by strides of 0, except the axes that the kernel reads as dense."""
    _check_fit(name, x, shape)
    x = x.to("cpu").expand(*x.shape[:strided_axes], *shape[strided_axes:])
    if strided_axes == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    return x.expand(shape)


def _check_fit(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    fits = x.ndim == len(shape)
    if not fits or any(n not in (1, size) for n, size in zip(x.shape, shape, strict=True)):
        raise ShapeError(
            f"native: {name} has shape {tuple(x.shape)} instead of {shape}, or ones to broadcast."
        )
