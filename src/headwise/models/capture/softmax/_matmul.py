"""Matrix products written with `@`, `bmm` or `einsum`, in one layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


# These add a product to another tensor.
ADDED_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)


@dataclass(frozen=True)
class Product:
    """Weights times values: a sum over the last axis of weights and the `S` axis of values."""

    weights: Float[Tensor, "*lead T S"]
    values: Float[Tensor, "*shared S Dv"]
    heads: Float[Tensor, "*lead T Dv"]


def is_product(func: Callable[..., Any]) -> bool:
    """Whether a torch function computes a matrix product and nothing else."""
    return func in _MATMUL or func is torch.einsum


def has_matrix(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a factor of a product is a matrix, which is the same for all texts.

    Queries, keys and values are not; the weights of a router, a table of embeddings and a list of
    experts are.
    """
    factors = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
    tensors = [x for x in factors if isinstance(x, Tensor)]
    return any(x.ndim < 3 for x in (tensors[1:] if func in ADDED_PRODUCTS else tensors))


def product_within(
    output: Tensor, added: Tensor, *factors: Tensor, beta: float | int = 1, **_: Any
) -> Float[Tensor, "*lead T S"]:
    """The product in the result of `baddbmm`, which added `beta * added` to it."""
    output = output.detach()
    return output.clone() if beta == 0 else output - beta * added.detach()


def read_product(
    func: Callable[..., Any], args: tuple[Any, ...], output: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    """The factors of a product; None if weights are not summed over their last axis.

    Args:
        weights: The tensors that hold the weights, by identity.
    """
    if func is torch.einsum:
        return _read_einsum(args, output, weights)
    left, right = args[:2]
    factors = (left, right, output) if id(left) in weights else (right.mT, left.mT, output.mT)
    # Weights that all texts or heads share are not those of heads.
    return Product(*factors) if factors[0].shape[:-1] == factors[2].shape[:-1] else None


def _read_einsum(
    args: tuple[Any, ...], output: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    equation = args[0]
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    factors = list(zip(inputs.split(","), operands, strict=True))
    if id(operands[0]) not in weights:
        factors.reverse()
    (w, weight), (v, value) = factors
    lead, t, s = w[:-2], w[-2:-1], w[-1:]
    width = [letter for letter in v if letter not in w]
    supported = "." not in equation and len(width) == 1 and s in v and s not in out and t not in v
    if not supported or sorted(out) != sorted([*lead, t, *width]):
        return None
    value = value.permute([v.index(letter) for letter in [*lead, s, *width] if letter in v])
    for axis, letter in enumerate(lead):
        value = value if letter in v else value.unsqueeze(axis)
    return Product(
        weight, value, output.permute([out.index(letter) for letter in [*lead, t, *width]])
    )
