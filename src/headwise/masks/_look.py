"""What may be asked of a tensor while it is traced or transformed."""

import torch
from torch import Tensor


def can_look(x: Tensor) -> bool:
    """Whether looking at numbers is cheap and allowed: in memory, and not while being traced.

    A look makes a GPU wait, breaks a compiled graph, and is impossible inside `vmap`. Where it
    is not allowed, what would be decided by it is computed in any case, to the same result.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    # There is no public way to ask. A compiler cannot follow this one, and has left above.
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not wrapped


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


def is_transformed(x: Tensor) -> bool:
    """Whether `torch.func` is differentiating, under which nothing can be computed again."""
    # There is no public way to ask, and none that a compiler follows.
    return not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(x)
