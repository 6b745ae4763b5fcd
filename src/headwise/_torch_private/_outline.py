"""The outline of tensors: everything about them but their values."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise._torch_private._tracing import PLAIN

Outline = tuple[Hashable, ...]


def eager_outline(
    q: Tensor, k: Tensor, v: Tensor, kernel: Callable[[], Hashable], *others: Hashable
) -> Outline | None:
    """What decides how queries, keys and values are computed, but for their values, and `others`.

    None where that may not be remembered: unless all of them are plain tensors, and nothing but the
    usual autograd follows them. This asks all that `is_eager` does, in one function, since it runs
    at every call: with those that `is_eager` calls it would take 9 µs in place of 3.

    Args:
        kernel: Gives the loaded kernel. A compiler does not ask it, since it would trace it.
    """
    functions = torch._C
    try:
        if (
            torch.compiler.is_dynamo_compiling()
            or functions._is_tracing()
            or functions._len_torch_dispatch_stack()
            or functions._functorch.peek_interpreter_stack() is not None
            or getattr(forward_ad, "_current_level", -1) >= 0
            or functions._is_any_autocast_enabled()
            or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
            or q.is_neg() or k.is_neg() or v.is_neg()
            or not (q.data_ptr() and k.data_ptr() and v.data_ptr())
        ):  # fmt: skip
            return None
    except (RuntimeError, AttributeError):
        # A tensor is mapped over or not strided; or another version of torch has other names.
        return None
    learns = torch.is_grad_enabled()
    return (
        q.shape, q.stride(), q.dtype, q.is_cpu or q.device, learns and q.requires_grad,
        k.shape, k.stride(), k.dtype, k.is_cpu or k.device, learns and k.requires_grad,
        v.shape, v.stride(), v.dtype, v.is_cpu or v.device, learns and v.requires_grad,
        torch.get_num_threads(), kernel(), others,
    )  # fmt: skip
