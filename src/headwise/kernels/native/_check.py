"""The checks before a pointer leaves Python: C++ trusts all of it.

All of this runs at every call, so it takes as few operations as possible.
"""

import math
from collections.abc import Container, Iterable, Mapping
from operator import mul

import torch
from torch import Tensor

from headwise._torch_private import is_plain
from headwise.errors import ArgumentError, ShapeError

# Positions and counts are 32-bit numbers in a lane, and bytes of an array 64-bit ones.
MOST_TOKENS, MOST_BYTES = 2**31 - 2**10, 2**62

# The first byte of a tensor in memory, one past its last, and its name.
ByteSpan = tuple[int, int, str]


def check_axes(*shapes: tuple[int, ...]) -> None:
    """Refuse queries, keys and values that do not have four axes each.

    Raises:
        ShapeError: one has other axes.
    """
    if any(len(shape) != 4 for shape in shapes):
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ShapeError(f"native: shapes {listed}. Give batch, heads, tokens and width of each.")


def check_heads(H: int, Hkv: int) -> None:
    """Refuse heads that cannot share keys and values evenly: the kernel divides one by the other.

    Raises:
        ShapeError: H is not a multiple of Hkv.
    """
    if Hkv < 1 or H % Hkv:
        raise ShapeError(
            f"native: {H} query heads cannot share {Hkv} key/value heads evenly. "
            f"Make H a multiple of Hkv."
        )


def check_sizes(sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse lengths and sizes in bytes that the integers of the kernel cannot hold.

    Raises:
        ShapeError: there are too many tokens, or an array would be too large.
    """
    T, S = sizes["T"], sizes["S"]
    if T + S > MOST_TOKENS:
        raise ShapeError(
            f"native: {T} queries and {S} keys are more than {MOST_TOKENS} together. "
            f"Use backend='rows'."
        )
    for name, shape in shapes.items():
        check_size(name, shape)


def check_size(name: str, shape: tuple[int, ...]) -> None:
    """Refuse an array whose size in bytes does not fit into 64 bits.

    Raises:
        ShapeError: it is too large.
    """
    # Steps over an axis are counted also where another axis is empty.
    entries = math.prod(shape) or math.prod(length or 1 for length in shape)
    if 8 * entries > MOST_BYTES:
        raise ShapeError(
            f"native: {name} of shape {shape} is too large to be counted in bytes. "
            f"Use backend='rows'."
        )


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strided_axes: int = 0
) -> ByteSpan:
    """Refuse a tensor that is not an array of this shape and dtype, dense but for its first axes.

    Raises:
        ArgumentError: the dtype, device, kind, layout or alignment is another.
        ShapeError: the shape is another.
    """
    if x.shape != shape:
        raise ShapeError(f"native: {name} has shape {tuple(x.shape)} instead of {tuple(shape)}.")
    span = check_memory(name, x, dtype, reach(shape, x.stride()) * dtype.itemsize)
    if not (x.is_contiguous() or (strided_axes and has_dense_rows(x))):
        raise ArgumentError(
            f"native: {name} has strides of {x.stride()}, but its "
            f"{'last axis is' if strided_axes else 'axes are'} read as dense. "
            f"Give {name}.contiguous()."
        )
    if not is_aligned(span, dtype):
        raise ArgumentError(
            f"native: {name} begins at byte {span[0]}, which is not a multiple of "
            f"{dtype.itemsize}. Give an aligned copy: {name}.clone()."
        )
    return span


def check_memory(name: str, x: Tensor, dtype: torch.dtype, length: int) -> ByteSpan:
    """Refuse a tensor that is not in memory with this dtype and this many bytes.

    Raises:
        ArgumentError: it is of another dtype, device or kind, or its memory is too short.
    """
    if x.dtype != dtype or not x.is_cpu:
        raise ArgumentError(
            f"native: {name} is {x.dtype} on {x.device}. The kernel takes {dtype} on the CPU."
        )
    if not is_plain(x):
        raise ArgumentError(
            f"native: {name} is a {type(x).__name__}, whose numbers may not be in memory. "
            f"Give a plain tensor."
        )
    return check_extent(name, x, length)


def check_extent(name: str, x: Tensor, length: int) -> ByteSpan:
    """Refuse a tensor whose memory ends less than `length` bytes after its first element.

    Raises:
        ArgumentError: its memory is shorter.
    """
    start = x.data_ptr()
    # A tensor keeps its shape when its memory is freed or made smaller, as sharding does.
    stop = x.storage_offset() * x.itemsize + length
    if length and (not start or stop > x.untyped_storage().nbytes()):
        raise ArgumentError(
            f"native: {name} of shape {tuple(x.shape)} is not in memory: its numbers would end at "
            f"byte {stop} of {x.untyped_storage().nbytes() if start else 0}. "
            f"Give a tensor whose memory was not freed."
        )
    return start, start + length, name


def is_aligned(span: ByteSpan, dtype: torch.dtype) -> bool:
    return span[0] % dtype.itemsize == 0


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements in memory from the first of an array to its last."""
    return 0 if 0 in shape else 1 + sum(map(mul, shape, strides)) - sum(strides)


def check_apart(spans: Iterable[ByteSpan], written: Container[str]) -> None:
    """Refuse an array that is written and shares memory with another.

    Raises:
        ArgumentError: two of them overlap.
    """
    # In the order in which they begin: the furthest end so far, of all and of those written.
    furthest = furthest_written = (0, 0, "")
    for span in sorted(spans):
        start, stop, name = span
        before = furthest if name in written else furthest_written
        if start < min(before[1], stop):
            first, other = (name, before[2]) if name in written else (before[2], name)
            raise ArgumentError(
                f"native: {first} shares memory with {other}. Give it memory of its own."
            )
        if stop > furthest[1]:
            furthest = span
        if stop > furthest_written[1] and name in written:
            furthest_written = span


def has_dense_rows(x: Tensor) -> bool:
    """Whether the last axis of a tensor is dense."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or 0 in x.shape


def dense_last(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, copied where their last axis is not dense."""
    return tuple(x if has_dense_rows(x) else x.contiguous() for x in tensors)
