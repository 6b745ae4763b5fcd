"""What is checked before a pointer leaves Python. C trusts all of it."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from headwise.errors import ArgumentError, ShapeError

# Positions and counts are 32-bit numbers in a lane, and bytes of an array 64-bit ones.
MOST_TOKENS, MOST_BYTES = 2**31 - 2**10, 2**62


def check_sizes(sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse lengths that a lane cannot count, and arrays whose size is no 64-bit number.

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
        size = 8
        for length in shape:
            size *= max(1, length)
        if size > MOST_BYTES:
            raise ShapeError(
                f"native: {name} of shape {shape} is too large to be counted in bytes. "
                f"Use backend='rows'."
            )


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, steps: int = 0
) -> None:
    """Refuse what is not such an array in memory, dense but for the steps of its first axes.

    Raises:
        ArgumentError: the dtype, device, kind, layout or alignment is another.
        ShapeError: the shape is another.
    """
    if x.dtype != dtype or x.device.type != "cpu":
        raise ArgumentError(
            f"native: {name} is {x.dtype} on {x.device}. The kernel takes {dtype} on the CPU."
        )
    if not is_plain(x):
        raise ArgumentError(
            f"native: {name} is a {type(x).__name__}, whose numbers may not be in memory. "
            f"Give a plain tensor."
        )
    if tuple(x.shape) != shape:
        raise ShapeError(f"native: {name} has shape {tuple(x.shape)} instead of {shape}.")
    dense = x.is_contiguous() if steps == 0 else x.shape[-1] <= 1 or x.stride(-1) == 1
    if not dense:
        raise ArgumentError(
            f"native: {name} has steps of {x.stride()}, but its "
            f"{'axes are' if steps == 0 else 'last axis is'} read as dense. "
            f"Give {name}.contiguous()."
        )
    if x.data_ptr() % x.itemsize:
        raise ArgumentError(
            f"native: {name} begins at byte {x.data_ptr()}, no multiple of {x.itemsize}. "
            f"Give an aligned copy: {name}.clone()."
        )


def check_apart(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
    """Refuse an output that shares memory with an input or with another output.

    Raises:
        ArgumentError: two of them overlap.
    """
    written = [(*_span(x), name) for name, x in outputs.items() if x.numel()]
    read = [(*_span(x), name) for name, x in inputs.items() if x.numel()]
    for at, (start, stop, name) in enumerate(written):
        for other_start, other_stop, other in written[at + 1 :] + read:
            if start < other_stop and other_start < stop:
                raise ArgumentError(
                    f"native: {name} shares memory with {other}. Give it memory of its own."
                )


def is_plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor lie in memory as its strides say."""
    plain = type(x) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and x.layout == torch.strided and not x.is_neg()


def dense_last(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, copied where their last axis is not dense."""
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous() for x in tensors)


def _span(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor and one past its last."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize
