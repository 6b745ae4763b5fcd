"""A problem on its way to the kernel: filled in, checked, solved."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from headwise._native import Problem, library
from headwise.kernels.native._check import check_apart, check_sizes, check_tensor, dense_last

# Pairs of queries and keys up to which a second thread is not worth waking.
ALONE = 1 << 15
# What pointers of empty tensors point to.
_NOWHERE = torch.zeros(64)


@dataclass
class Filling:
    """A problem, and the tensors that its pointers point to."""

    sizes: dict[str, int]
    problem: Problem = field(default_factory=Problem)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
    ) -> "Filling":
        """Queries, keys and values in float32; nothing is asked for yet."""
        q, k, v = dense_last((q, k, v))
        (B, H, T, D), (_, Hkv, S, Dv) = q.shape, v.shape
        sizes = {"B": B, "H": H, "Hkv": Hkv, "T": T, "S": S, "D": D, "Dv": Dv}
        shapes = {"q": (B, H, T, D), "k": (B, Hkv, S, D), "v": (B, Hkv, S, Dv)}
        check_sizes(sizes, shapes)
        filling = cls(sizes)
        for name, size in sizes.items():
            filling.number(name, size)
        for (name, shape), x in zip(shapes.items(), (q, k, v), strict=True):
            filling.give(name, x, shape, steps=3)
        return filling

    def number(self, name: str, value: int | float) -> None:
        """Set a field that is a number."""
        setattr(self.problem, name, value)

    def give(
        self,
        name: str,
        x: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        steps: int = 0,
    ) -> None:
        """Let the kernel read a tensor, dense but for the steps of its first axes."""
        self._point(name, x, tuple(shape), dtype, steps)
        self.inputs[name] = x

    def ask(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        into: Tensor | None = None,
        steps: int = 0,
    ) -> Tensor:
        """Let the kernel write a tensor: a new one, or one that is given."""
        shape = tuple(shape)
        check_sizes(self.sizes, {name: shape})
        x = torch.empty(shape, dtype=dtype) if into is None else into
        self._point(name, x, shape, dtype, steps)
        self.outputs[name] = x
        return x

    def solve(self, function: str = "headwise_forward") -> None:
        """Run the kernel.

        Raises:
            MemoryError: there is no memory to compute in.
        """
        check_apart(self.outputs, self.inputs)
        pairs = self.sizes["B"] * self.sizes["H"] * self.sizes["T"] * self.sizes["S"]
        self.problem.threads = torch.get_num_threads() if pairs > ALONE else 1
        if getattr(library().functions, function)(ctypes.byref(self.problem)):
            raise MemoryError(f"native: there is no memory to compute in, for {self.sizes}.")

    def _point(
        self, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, steps: int
    ) -> None:
        check_tensor(name, x, shape, dtype, steps)
        setattr(self.problem, name, x.data_ptr() if x.numel() else _NOWHERE.data_ptr())
        if steps and x.numel():
            getattr(self.problem, f"{name}_step")[:] = x.stride()[:steps]
