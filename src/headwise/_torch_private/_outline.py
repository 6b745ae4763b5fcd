"""The outline of tensors: everything about them but their values."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise._torch_private._tracing import PLAIN

Outline = tuple[Hashable, ...]


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor; some, such as meta, have none."""
    # Both have it, and torch.compile of torch 2.11 cannot ask whether they do.
    if x.is_cpu:
        return torch.is_autocast_enabled("cpu")
    if x.is_cuda:
        return torch.is_autocast_enabled("cuda")
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def eager_outline(
    q: Tensor, k: Tensor, v: Tensor, kernel: Callable[[], Hashable], *others: Hashable
) -> Outline | None:
    """What decides how queries, keys and values are computed, but for their values, and `others`.

    None where that may not be remembered: unless all of them are plain tensors, and nothing but the
    usual autograd follows them. This asks all that `is_eager` does. It runs at every call, after a
    kernel that has filled the caches, so that each further function takes microseconds: there is
    none, and each tensor is asked as little as possible.

    Args:
        kernel: Gives the loaded kernel. A compiler does not ask it, since it would trace it.
    """
    functions = torch._C
    if (
        torch.compiler.is_dynamo_compiling()
        or functions._is_tracing()
        or functions._len_torch_dispatch_stack()
        or functions._functorch.peek_interpreter_stack() is not None
        or getattr(forward_ad, "_current_level", -1) >= 0
        or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)
        or q.is_neg() or k.is_neg() or v.is_neg()
    ):  # fmt: skip
        return None
    try:
        has_memory = q.data_ptr() and k.data_ptr() and v.data_ptr()
    except RuntimeError:
        has_memory = 0
    if not has_memory:  # one is mapped over, or not strided, or empty
        return None
    learns = torch.is_grad_enabled()
    return (
        q.shape, q.stride(), q.dtype, q.is_cpu or q.device, learns and q.requires_grad,
        k.shape, k.stride(), k.dtype, k.is_cpu or k.device, learns and k.requires_grad,
        v.shape, v.stride(), v.dtype, v.is_cpu or v.device, learns and v.requires_grad,
        torch.get_num_threads(), functions._is_any_autocast_enabled() and under_autocast(q),
        kernel(), others,
    )  # fmt: skip
