"""Which kernel computes, and why: one rule in one place."""

from typing import NamedTuple

from headwise.errors import ArgumentError
from headwise.kernels._rule import Rule

BACKENDS = ("auto", "fused", "rows")


class Choice(NamedTuple):
    """The kernel that computes, and the reason it was chosen."""

    backend: str
    reason: str


def choose(backend: str, rule: Rule) -> Choice:
    """Pick the kernel for a rule: torch's fused one unless it cannot follow the rule.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot follow the rule.
    """
    if backend not in BACKENDS:
        raise ArgumentError(
            f"attend: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    if backend == "rows":
        return Choice("rows", "asked for by name")
    missing = [name for name in ("softcap", "sinks") if getattr(rule, name) is not None]
    if not missing:
        return Choice("fused", "torch's kernel follows this rule")
    if backend == "fused":
        raise ArgumentError(
            f"attend: backend='fused' has no {' and no '.join(missing)}. "
            f"Use backend='rows', or 'auto' to let attend choose."
        )
    return Choice("rows", f"torch's kernel has no {' and no '.join(missing)}")
