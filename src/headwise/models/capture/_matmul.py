"""Products of matrices, whoever writes them: `@`, `bmm` and `einsum` in one layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


@dataclass(frozen=True)
class Product:
    """Weights times values, the sum over the last axis of one and the last but one of the other."""

    weights: Float[Tensor, "*lead T S"]
    values: Float[Tensor, "*some S Dv"]
    heads: Float[Tensor, "*lead T Dv"]

    def transposed(self) -> "Product":
        """The same product with the factors in the other order."""
        return Product(self.values.mT, self.weights.mT, self.heads.mT)


def is_product(func: Callable[..., Any]) -> bool:
    """Whether this function of torch multiplies matrices, and adds nothing to them."""
    return func in _MATMUL or func is torch.einsum


def read_product(
    func: Callable[..., Any], args: tuple[Any, ...], answer: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    """What was multiplied; None where the weights are not summed over their last axis.

    Args:
        weights: The tensors that hold the weights, by identity.
    """
    if func is torch.einsum:
        return _read_einsum(args, answer, weights)
    one, two = args[:2]
    product = Product(one, two, answer)
    return product if id(one) in weights else product.transposed()


def _read_einsum(
    args: tuple[Any, ...], answer: Tensor, weights: dict[int, Tensor]
) -> Product | None:
    equation = args[0]
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(equation, str) or "->" not in equation or len(operands) != 2:
        return None
    given, out = equation.replace(" ", "").split("->")
    sides = list(zip(given.split(","), operands, strict=True))
    if id(operands[0]) not in weights:
        sides.reverse()
    (w, weight), (v, value) = sides
    lead, t, s = w[:-2], w[-2:-1], w[-1:]
    width = [letter for letter in v if letter not in w]
    understood = "." not in equation and len(width) == 1 and s in v and s not in out and t not in v
    if not understood or sorted(out) != sorted([*lead, t, *width]):
        return None
    value = value.permute([v.index(letter) for letter in [*lead, s, *width] if letter in v])
    for axis, letter in enumerate(lead):
        value = value if letter in v else value.unsqueeze(axis)
    return Product(
        weight, value, answer.permute([out.index(letter) for letter in [*lead, t, *width]])
    )
