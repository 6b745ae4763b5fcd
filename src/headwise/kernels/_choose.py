"""Which kernel computes heads, or statistics of rows, and why: the one rule of choice.

The first kernel is chosen that can and is expected to be faster than those after it. Each kernel
has its thresholds; `benchmarks/results/kernel-choice.md` has the measurements behind them.
"""

from headwise.errors import ArgumentError
from headwise.kernels.fused import FUSED
from headwise.kernels.native import NATIVE
from headwise.kernels.rows import ROWS
from headwise.kernels.spec import AttentionKernel, AttentionProblem, KernelChoice, RowRequest
from headwise.kernels.triton import TRITON

# In this order they are tried: the last one can compute everything.
KERNELS: tuple[AttentionKernel, ...] = (TRITON, NATIVE, FUSED, ROWS)
FALLBACK = KERNELS[-1]
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def choose(problem: AttentionProblem, backend: str = "auto") -> KernelChoice:
    """Pick the kernel that computes this for `attend`, without reading the values of tensors.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    kernel, reason = kernel_for(problem, None, backend)
    return kernel.plan(problem, reason)


def kernel_for(
    problem: AttentionProblem, request: RowRequest | None, backend: str = "auto"
) -> tuple[AttentionKernel, str]:
    """The kernel that computes heads, or the statistics of a request, and why it is this one.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    if backend != "auto":
        return _named(problem, request, backend), "it was named"
    reason = None
    for kernel in KERNELS:
        if not kernel.is_preferred(problem, request):
            continue
        against = kernel.why_not(problem, request)
        if against is None:
            return kernel, reason or f"{kernel.name} is the fastest for this"
        reason = f"{kernel.name} was left out: {against}"
    raise AssertionError("rows compute everything")


def _named(problem: AttentionProblem, request: RowRequest | None, backend: str) -> AttentionKernel:
    """The kernel of that name, if it can compute this."""
    function = "attend" if request is None else "row_statistics"
    kernel = BY_NAME.get(backend)
    if kernel is None:
        raise ArgumentError(
            f"{function}: backend={backend!r} is not known. "
            f"Choose one of {', '.join(('auto', *BY_NAME))}."
        )
    reason = kernel.why_not(problem, request)
    if reason is not None:
        raise ArgumentError(
            f"{function}: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto' to let {function} choose."
        )
    return kernel


def computes_both_at_once(problem: AttentionProblem) -> bool:
    """Whether one pass of a kernel computes heads and their statistics, as far as sizes tell."""
    return NATIVE.why_not(problem) is None
