"""Which kernel computes heads, and why: the one rule of choice.

The thresholds stand with each kernel, and what was measured for them in `docs/kernel-choice.md`.
"""

from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.fused import FUSED
from headwise.kernels.native import NATIVE
from headwise.kernels.rows import ROWS
from headwise.kernels.spec import (
    HEADS_ALONE,
    AttentionKernel,
    AttentionRule,
    Extras,
    KernelChoice,
)
from headwise.kernels.triton import TRITON

# In this order they are tried: the last one can compute everything.
KERNELS: tuple[AttentionKernel, ...] = (TRITON, NATIVE, FUSED, ROWS)
BACKENDS = ("auto", "fused", "rows", "native", "triton")
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def choose(
    rule: AttentionRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str = "auto",
    dropout_p: float = 0.0,
    extras: Extras = HEADS_ALONE,
) -> KernelChoice:
    """Pick the kernel that computes `attend` of these inputs, without reading their values.

    It is the first that can and is expected to be faster than those after it. The kernel in
    Triton, which was never measured, is taken only by name.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    inputs = (q, k, v, rule)
    if backend == "auto":
        return _first(inputs, dropout_p, extras)
    kernel = BY_NAME.get(backend)
    if kernel is None:
        raise ArgumentError(
            f"attend: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    reason = kernel.why_not(*inputs, dropout_p, extras)
    if reason is not None:
        raise ArgumentError(
            f"attend: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto' to let attend choose."
        )
    return kernel.plan(*inputs, "it was named")


def _first(
    inputs: tuple[Tensor, Tensor, Tensor, AttentionRule], dropout_p: float, extras: Extras
) -> KernelChoice:
    reason = None
    for kernel in KERNELS:
        if not kernel.is_preferred(*inputs[:2]):
            continue
        against = kernel.why_not(*inputs, dropout_p, extras)
        if against is None:
            return kernel.plan(*inputs, reason or f"{kernel.name} is the fastest for this")
        reason = f"{kernel.name} was left out: {against}"
    raise AssertionError("rows compute everything")
