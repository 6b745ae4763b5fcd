"""Builds the problem of the native kernel: checks inputs, allocates outputs, runs the kernel.

A problem is solved at once, or prepared and solved for all tensors of one outline.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._library import Problem
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels.native._check import (
    ByteSpan,
    check_apart,
    check_axes,
    check_heads,
    check_memory,
    check_size,
    check_sizes,
    check_tensor,
    dense_last,
    is_aligned,
    reach,
)
from headwise.kernels.native._prepared import (
    PreparedProblem,
    allocation,
    n_threads,
    run,
    shares_threads,
)

# The dtypes that the kernel reads, and their numbers in `ElementType`.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPE_NAMES = ", ".join(map(str, DTYPES))
# The address of empty tensors: a null pointer would mean that there is none.
_NOWHERE = torch.zeros(64)
_Strides = tuple[int, ...]


class _Layout(NamedTuple):
    """Sizes and strides that fit together, and how many bytes queries, keys and values span."""

    sizes: dict[str, int]
    problem: Problem
    lengths: tuple[tuple[str, int], ...]
    dense: bool  # in their last axes, as the kernel takes them


@lru_cache(maxsize=1024)  # layers and batches of a model have few different layouts
def _layout(
    dtype: torch.dtype,
    q: torch.Size,
    q_strides: _Strides,
    k: torch.Size,
    k_strides: _Strides,
    v: torch.Size,
    v_strides: _Strides,
) -> _Layout:
    if dtype not in DTYPES:
        raise ArgumentError(f"native: q is {dtype}. The kernel takes {_DTYPE_NAMES}.")
    check_axes(q, k, v)
    (B, H, T, D), (_, Hkv, S, Dv) = q, v
    sizes = {"B": B, "H": H, "Hkv": Hkv, "T": T, "S": S, "D": D, "Dv": Dv}
    check_heads(H, Hkv)
    check_sizes(sizes, {"q": q, "k": k, "v": v})
    for name, shape, fitting in (("k", k, (B, Hkv, S, D)), ("v", v, (B, Hkv, S, Dv))):
        if shape != fitting:
            raise ShapeError(f"native: {name} has shape {tuple(shape)} instead of {fitting}.")
    problem = Problem(
        dtype=DTYPES[dtype],
        **sizes,
        q_stride=q_strides[:3],
        k_stride=k_strides[:3],
        v_stride=v_strides[:3],
    )
    inputs = (("q", q, q_strides), ("k", k, k_strides), ("v", v, v_strides))
    lengths = tuple((name, dtype.itemsize * reach(*lies)) for name, *lies in inputs)
    dense = all(strides[-1] == 1 or shape[-1] <= 1 or 0 in shape for _, shape, strides in inputs)
    return _Layout(sizes, problem, lengths, dense)


@dataclass
class ProblemBuilder:
    """A problem, and the tensors that its pointers refer to."""

    sizes: dict[str, int]
    problem: Problem = field(default_factory=Problem)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    spans: list[ByteSpan] = field(default_factory=list)
    copied: bool = False  # what it reads are copies of the queries, keys and values it was given

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
    ) -> "ProblemBuilder":
        """A problem with queries, keys and values of one dtype, without outputs."""
        layout = _layout(q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        if not layout.dense:
            return replace(cls.of(*dense_last((q, k, v))), copied=True)
        builder = cls(layout.sizes, Problem.from_buffer_copy(layout.problem))
        for (name, length), x in zip(layout.lengths, (q, k, v), strict=True):
            span = check_memory(name, x, q.dtype, length)
            if not is_aligned(span, q.dtype):
                return replace(cls.of(q.clone(), k.clone(), v.clone()), copied=True)
            builder._point(name, span, x)
            builder.inputs[name] = x
        return builder

    def set(self, name: str, value: int | float) -> None:
        """Set a field that is a number."""
        setattr(self.problem, name, value)

    def add_input(
        self,
        name: str,
        x: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strided_axes: int = 0,
    ) -> None:
        """Add an input: a tensor that is dense except for its first, strided axes."""
        self._point(name, check_tensor(name, x, shape, dtype, strided_axes), x, strided_axes)
        self.inputs[name] = x

    def add_output(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        strides: tuple[int, ...] = (),
        strided_axes: int = 0,
    ) -> Tensor:
        """Allocate an output: dense, or with these strides."""
        check_size(name, shape)
        q = self.inputs["q"]  # new tensors go to its device, whatever the default is
        if strides:
            x = q.new_empty_strided(shape, strides, dtype=dtype)
        else:
            x = q.new_empty(shape, dtype=dtype)
        start = x.data_ptr()
        self._point(name, (start, start + x.nbytes, name), x, strided_axes)
        self.outputs[name] = x
        return x

    def solve(self, function: str = "headwise_forward") -> bool:
        """Run the kernel. Returns whether all requested heads are finite.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        check_apart(self.spans, self.outputs)
        self.problem.threads = n_threads(shares_threads(self.problem))
        return run(self.problem, function)

    def prepare(self, constant: Collection[str] = ()) -> "PreparedProblem | None":
        """The problem with all its outputs, to be solved for other tensors of its outline.

        None if it reads copies of the inputs, or if there is nothing to compute.

        Args:
            constant: The outputs that are the same for all of these tensors: computed once.
        """
        inputs, problem = self.inputs, self.problem
        if self.copied or not all(x.numel() for x in (inputs["q"], inputs["k"])):
            return None
        return PreparedProblem(
            problem=problem,
            shares_threads=shares_threads(problem),
            lengths=[(name, stop - start) for start, stop, name in self.spans[:3]],
            outputs=[(name, allocation(x)) for name, x in self.outputs.items()],
            kept=[x for name, x in inputs.items() if name not in ("q", "k", "v")],
            constant=constant,
        )

    def _point(self, name: str, span: ByteSpan, x: Tensor, strided_axes: int = 0) -> None:
        self.spans.append(span)
        setattr(self.problem, name, address(span[0]))
        if strided_axes:
            getattr(self.problem, f"{name}_stride")[:] = x.stride()[:strided_axes]


def address(start: int) -> int:
    """The pointer that the kernel gets for an array at this address."""
    return start or _NOWHERE.data_ptr()
