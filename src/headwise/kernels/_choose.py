"""Which kernel computes heads, or statistics of rows, and why: the one rule of choice.

The first kernel is chosen that can and is expected to be faster than those after it. Each kernel
has its thresholds; `benchmarks/results/kernel-choice.md` has the measurements behind them.
"""

from collections.abc import Callable

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
BACKENDS = ("auto", *BY_NAME)


def choose(problem: AttentionProblem, backend: str = "auto") -> KernelChoice:
    """Pick the kernel that computes this for `attend`, without reading the values of tensors.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    if backend == "auto":
        return _fastest(problem)
    kernel = _named("attend", backend, lambda kernel: kernel.why_not(problem))
    return kernel.plan(problem, "it was named")


def choose_for_statistics(
    problem: AttentionProblem, request: RowRequest | None, backend: str = "auto"
) -> AttentionKernel:
    """Pick the kernel that computes statistics for `row_statistics`.

    Args:
        request: None asks for the kernel of all statistics that have no special needs.
    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    if backend != "auto":
        return _named(
            "row_statistics", backend, lambda kernel: kernel.why_no_statistics(problem, request)
        )
    for kernel, is_preferred in zip(KERNELS, preferred_for_statistics(problem), strict=True):
        if is_preferred and kernel.why_no_statistics(problem, request) is None:
            return kernel
    raise AssertionError("rows compute everything")


def preferred_for_statistics(problem: AttentionProblem) -> tuple[bool, ...]:
    """Whether each kernel is expected to be faster than those after it, for statistics."""
    # By a list, since this runs at every call and a generator takes more steps.
    return tuple([kernel.is_preferred_for_statistics(problem) for kernel in KERNELS])


def computes_both_at_once(problem: AttentionProblem) -> bool:
    """Whether one pass of a kernel computes heads and their statistics, as far as sizes tell."""
    return NATIVE.why_not(problem) is None


def _named(
    function: str, backend: str, why_not: Callable[[AttentionKernel], str | None]
) -> AttentionKernel:
    """The kernel of that name, if it can compute this."""
    kernel = BY_NAME.get(backend)
    if kernel is None:
        raise ArgumentError(
            f"{function}: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    reason = why_not(kernel)
    if reason is not None:
        raise ArgumentError(
            f"{function}: backend={backend!r} cannot compute this: {reason}. "
            f"Use backend='auto' to let {function} choose."
        )
    return kernel


def _fastest(problem: AttentionProblem) -> KernelChoice:
    reason = None
    for kernel in KERNELS:
        if not kernel.is_preferred(problem):
            continue
        against = kernel.why_not(problem)
        if against is None:
            return kernel.plan(problem, reason or f"{kernel.name} is the fastest for this")
        reason = f"{kernel.name} was left out: {against}"
    raise AssertionError("rows compute everything")
