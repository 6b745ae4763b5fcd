"""The problem that the native kernel solves: its fields, the tensors behind its pointers, its call.

C++ trusts every pointer and size, so all of them are checked here. Outputs are allocated here too:
new memory overlaps with nothing that is read.
"""

import ctypes
import math
import os
from operator import mul

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._library import NO_MEMORY, NOT_FINITE, Problem, library
from headwise._torch_private import is_plain
from headwise.errors import ArgumentError, ShapeError

# The dtypes that the kernel reads, and their numbers in `ElementType`.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Positions and counts are 32-bit numbers in a lane, and bytes of an array 64-bit ones.
MOST_TOKENS, MOST_BYTES = 2**31 - 2**10, 2**62
# Pairs of queries and keys up to which waking a second thread costs more than it gains. Where few
# queries are packed, keys come from memory: it gains from these pairs times the width of a head on.
ONE_THREAD, ONE_THREAD_PACKED = (1 << 15) + 1, 3 << 14
# The address of empty tensors: a null pointer would mean that there is none.
_NOWHERE = torch.zeros(64)
# After a fork the pool of threads is gone, and waiting for it would hang.
_threads = {"most": 1 << 20}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _threads.update(most=1))


class NativeProblem:
    """A problem, and the tensors that its pointers refer to.

    Queries, keys and values are copied where they are not aligned, or not dense in their last axis.
    """

    def __init__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
        packed: bool = False,
    ) -> None:
        if q.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise ArgumentError(f"native: q is {q.dtype}. The kernel takes {names}.")
        check_sizes(q.shape, k.shape, v.shape)
        (B, H, T, D), (_, Hkv, S, Dv) = q.shape, v.shape
        self.fields = Problem(
            dtype=DTYPES[q.dtype], B=B, H=H, Hkv=Hkv, T=T, S=S, D=D, Dv=Dv, packed=packed
        )
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for name, x in (("q", q), ("k", k), ("v", v)):
            x = dense_last(x)
            x = x if x.data_ptr() % x.itemsize == 0 else x.clone()
            self.add_input(name, x, x.shape, q.dtype, strided_axes=3)

    def add_input(
        self,
        name: str,
        x: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strided_axes: int = 0,
    ) -> None:
        """Add an input: a tensor that is dense except for its first, strided axes."""
        check_tensor(name, x, shape, dtype, strided_axes)
        self._point(name, x, strided_axes)
        self.inputs[name] = x

    def add_output(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Allocate an output that is dense."""
        # New tensors go to the device of the queries, whatever the default is.
        self.outputs[name] = x = self.inputs["q"].new_empty(shape, dtype=dtype)
        self._point(name, x)
        return x

    def add_output_by_token(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Float[Tensor, "B H T _"]:
        """Allocate an output in the layout of torch's kernel: the heads of a token side by side."""
        _, H, T, D = shape
        q, strides = self.inputs["q"], (T * H * D, D, H * D, 1)
        self.outputs[name] = x = q.new_empty_strided(shape, strides, dtype=dtype or q.dtype)
        self._point(name, x, strided_axes=3)
        return x

    def solve(self, function: str = "headwise_forward") -> bool:
        """Run the kernel. Returns whether all requested heads are finite.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        self.fields.threads = n_threads(self.fields)
        outcome = getattr(library().functions, function)(ctypes.byref(self.fields))
        if outcome == NO_MEMORY:
            names = ("B", "H", "Hkv", "T", "S", "D", "Dv")
            sizes = {name: getattr(self.fields, name) for name in names}
            raise MemoryError(f"native: out of memory for a problem of sizes {sizes}.")
        return bool(outcome != NOT_FINITE)

    def _point(self, name: str, x: Tensor, strided_axes: int = 0) -> None:
        setattr(self.fields, name, x.data_ptr() or _NOWHERE.data_ptr())
        if strided_axes:
            setattr(self.fields, f"{name}_stride", x.stride()[:strided_axes])


def n_threads(problem: Problem) -> int:
    """The number of threads: those of torch, where a second one gains more than waking it costs."""
    size, least = problem.B * problem.H * problem.T * problem.S, ONE_THREAD
    if problem.packed:
        size, least = size * problem.D, ONE_THREAD_PACKED
    return min(torch.get_num_threads(), _threads["most"]) if size >= least else 1


def check_sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Refuse sizes that do not fit together, or not into the integers of the kernel.

    Raises:
        ShapeError: there are too many tokens, an array would be too large, or sizes differ.
    """
    if not len(q) == len(k) == len(v) == 4:
        listed = ", ".join(str(tuple(shape)) for shape in (q, k, v))
        raise ShapeError(f"native: shapes {listed}. Give batch, heads, tokens and width of each.")
    (B, H, T, D), (_, Hkv, S, Dv) = q, v
    if Hkv < 1 or H % Hkv:
        raise ShapeError(
            f"native: {H} query heads cannot share {Hkv} key/value heads evenly. "
            f"Make H a multiple of Hkv."
        )
    for name, shape, fitting in (("k", k, (B, Hkv, S, D)), ("v", v, (B, Hkv, S, Dv))):
        if shape != fitting:
            raise ShapeError(f"native: {name} has shape {tuple(shape)} instead of {fitting}.")
    if T + S > MOST_TOKENS:
        raise ShapeError(
            f"native: {T} queries and {S} keys are more than {MOST_TOKENS} together. "
            f"Use backend='rows'."
        )
    for name, shape in (("q", q), ("k", k), ("v", v)):
        # Steps over an axis are counted also where another axis is empty.
        entries = math.prod(shape) or math.prod(length or 1 for length in shape)
        if 8 * entries > MOST_BYTES:
            raise ShapeError(
                f"native: {name} of shape {tuple(shape)} is too large to be counted in bytes. "
                f"Use backend='rows'."
            )


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, strided_axes: int = 0
) -> None:
    """Refuse a tensor that is not an array of this shape and dtype, dense but for its first axes.

    Raises:
        ArgumentError: the dtype, device, kind, layout or alignment is another, or its memory is
            too short.
        ShapeError: the shape is another.
    """
    if x.shape != shape:
        raise ShapeError(f"native: {name} has shape {tuple(x.shape)} instead of {tuple(shape)}.")
    if x.dtype != dtype or not x.is_cpu:
        raise ArgumentError(
            f"native: {name} is {x.dtype} on {x.device}. The kernel takes {dtype} on the CPU."
        )
    if not is_plain(x):
        raise ArgumentError(
            f"native: {name} is a {type(x).__name__}, whose numbers may not be in memory. "
            f"Give a plain tensor."
        )
    start, length = x.data_ptr(), reach(shape, x.stride())
    # A tensor keeps its shape when its memory is freed or made smaller, as sharding does.
    stop = (x.storage_offset() + length) * x.itemsize
    if length and (not start or stop > x.untyped_storage().nbytes()):
        raise ArgumentError(
            f"native: {name} of shape {tuple(x.shape)} is not in memory: its numbers would end at "
            f"byte {stop} of {x.untyped_storage().nbytes() if start else 0}. "
            f"Give a tensor whose memory was not freed."
        )
    if not (x.is_contiguous() or (strided_axes and has_dense_rows(x))):
        raise ArgumentError(
            f"native: {name} has strides of {x.stride()}, but its "
            f"{'last axis is' if strided_axes else 'axes are'} read as dense. "
            f"Give {name}.contiguous()."
        )
    if start % x.itemsize:
        raise ArgumentError(
            f"native: {name} begins at byte {start}, which is not a multiple of {x.itemsize}. "
            f"Give an aligned copy: {name}.clone()."
        )


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements in memory from the first of an array to its last."""
    return 0 if 0 in shape else 1 + sum(map(mul, shape, strides)) - sum(strides)


def has_dense_rows(x: Tensor) -> bool:
    """Whether the last axis of a tensor is dense."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or 0 in x.shape


def dense_last(x: Tensor) -> Tensor:
    """The tensor, copied if its last axis is not dense."""
    return x if has_dense_rows(x) else x.contiguous()
