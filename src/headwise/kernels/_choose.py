"""Which kernel computes heads, and why: the one rule of choice.

The thresholds stand with each kernel, and what was measured for them in `docs/kernel-choice.md`.
"""

from headwise.errors import ArgumentError
from headwise.kernels.fused import FUSED
from headwise.kernels.native import NATIVE
from headwise.kernels.rows import ROWS
from headwise.kernels.spec import AttentionKernel, AttentionProblem, KernelChoice
from headwise.kernels.triton import TRITON

# In this order they are tried: the last one can compute everything.
KERNELS: tuple[AttentionKernel, ...] = (TRITON, NATIVE, FUSED, ROWS)
BACKENDS = ("auto", "fused", "rows", "native", "triton")
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def choose(problem: AttentionProblem, backend: str = "auto") -> KernelChoice:
    """Pick the kernel that computes this for `attend`, without reading the values of tensors.

    It is the first that can and is expected to be faster than those after it.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    if backend == "auto":
        return _first(problem)
    kernel = BY_NAME.get(backend)
    if kernel is None:
        raise ArgumentError(
            f"attend: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    reason = kernel.why_not(problem)
    if reason is not None:
        raise ArgumentError(
            f"attend: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto' to let attend choose."
        )
    return kernel.plan(problem, "it was named")


def computes_natively(problem: AttentionProblem) -> bool:
    """Whether the native kernel can compute this, without reading the values of tensors."""
    return NATIVE.why_not(problem) is None


def _first(problem: AttentionProblem) -> KernelChoice:
    reason = None
    for kernel in KERNELS:
        if not kernel.is_preferred(problem):
            continue
        against = kernel.why_not(problem)
        if against is None:
            return kernel.plan(problem, reason or f"{kernel.name} is the fastest for this")
        reason = f"{kernel.name} was left out: {against}"
    raise AssertionError("rows compute everything")
