"""What may be asked of a tensor while it is traced or transformed."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name


def can_look(*tensors: Tensor) -> bool:
    """Whether looking at numbers is cheap and allowed: in memory, and not while being traced.

    A look makes a GPU wait, breaks a compiled graph, and is impossible inside `vmap` or at fake
    tensors. Where it is not allowed, what would be decided by it is computed in any case, to the
    same result.
    """
    if torch.compiler.is_compiling():
        return False
    # There is no public way to ask. A compiler cannot follow this one, and has left above.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    # Asked at every call: a generator would take as long as the questions.
    return not [x for x in tensors if not x.is_cpu or isinstance(x, FakeTensor) or is_wrapped(x)]


def is_trained(*inputs: Tensor) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def known(condition: bool) -> bool:
    """Whether a condition on sizes holds; while being traced, whether it does for every size.

    Deciding by a size that is still open would settle it: the graph would then be for that size.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether `torch.func` is differentiating, under which nothing can be computed again."""
    # There is no public way to ask, and none that a compiler follows.
    asked = torch._C._functorch.is_gradtrackingtensor
    return not torch.compiler.is_compiling() and any(asked(x) for x in tensors)


def mapped_with(x: Tensor, others: Iterable[Tensor]) -> Tensor:
    """The same numbers, mapped over as well if `vmap` maps over the others."""
    # There is no public way to ask, and none that a compiler follows.
    if torch.compiler.is_compiling():
        return x
    for other in others:
        if torch._C._functorch.is_batchedtensor(other):
            x = x + torch.zeros_like(other, dtype=x.dtype).sum()
    return x
