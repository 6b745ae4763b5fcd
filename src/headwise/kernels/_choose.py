"""Which kernel computes, on what form of the mask, and why: one rule in one place.

Times are of CPUs, one thread, medians of interleaved repeats; `benchmarks/layer.py` takes them
again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels._rule import Rule
from headwise.masks import Window

BACKENDS = ("auto", "fused", "rows")
# Rows in one block, where blocks skip the keys that none of their rows may attend to.
BLOCK = 128


class Choice(NamedTuple):
    """The kernel that computes, what it is given, and the reasons."""

    backend: str  # "fused" or "rows"
    form: str  # of the mask: "none", "causal" (the kernel's own flag), "blocks" or "dense"
    packed: bool  # the heads of a group as rows of one head, so that keys are read once
    wide: bool  # half precision computed in float32
    reason: str


def choose(rule: Rule, q: Tensor, k: Tensor, backend: str = "auto") -> Choice:
    """Pick what computes `attend` for queries and keys: of their numbers nothing is read.

    Torch's fused kernel unless it cannot follow the rule, given the cheapest form of the mask.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot follow the rule.
    """
    kernel, why = _kernel(rule, backend)
    if kernel == "rows":
        form = "none" if rule.visible is None else "blocks"
        return Choice(kernel, form, packed=True, wide=True, reason=why)
    form, what = _form(rule, q, k)
    packed, wide = _is_packed(form, q, k), _is_wide(q, k)
    reasons = [why, what]
    if packed:
        reasons.append("the heads of a group are packed, so that keys and values are read once")
    if wide:
        reasons.append(f"its way back is slower in {q.dtype} than in float32")
    return Choice(kernel, form, packed, wide, "; ".join(reasons))


def _kernel(rule: Rule, backend: str) -> tuple[str, str]:
    if backend not in BACKENDS:
        raise ArgumentError(
            f"attend: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    if backend == "rows":
        return "rows", "asked for by name"
    missing = [name for name in ("softcap", "sinks") if getattr(rule, name) is not None]
    if not missing:
        return "fused", "torch's kernel follows this rule"
    if backend == "fused":
        raise ArgumentError(
            f"attend: backend='fused' has no {' and no '.join(missing)}. "
            f"Use backend='rows', or 'auto' to let attend choose."
        )
    return "rows", f"torch's kernel has no {' and no '.join(missing)}"


def _form(rule: Rule, q: Tensor, k: Tensor) -> tuple[str, str]:
    T, S = q.shape[2], k.shape[2]
    if rule.visible is None and rule.bias is None:
        return "none", "nothing is hidden"
    # Torch aligns its causal flag top-left, which is ours only where T equals S.
    is_flag = rule.visible == Window(None, 0) and rule.bias is None and T == S
    if is_flag and not _is_short(q):
        return "causal", "the mask is the kernel's own causal flag"
    share = 1.0 if torch.compiler.is_compiling() else _share(rule, T, S)
    if share < 0.8:
        return "blocks", f"blocks of {BLOCK} rows look at {share:.0%} of queries x keys"
    return ("causal" if is_flag else "dense"), f"blocks of rows would look at {share:.0%}"


def _is_short(q: Tensor) -> bool:
    """Whether torch's causal kernel computes the hidden half too: up to 512 keys it does.

    Forward at (1, 512, 12 heads of 64) in float32, blocks over flag: 0.65 (Zen 4, AVX-512), 0.94
    (Sapphire Rapids); at 256 rows 1.09, at 1024 1.11; in bfloat16 1.15; backward 1.05.
    """
    return q.dtype == torch.float32 and 256 < q.shape[2] <= 512 and not is_trained(q)


def _share(rule: Rule, T: int, S: int) -> float:
    """The share of queries x keys that blocks of rows look at."""
    blocks = blocks_of(T)
    return sum(len(block) * len(rule.extent(block, T, S)) for block in blocks) / max(1, T * S)


def blocks_of(T: int) -> list[range]:
    """The rows, a block at a time."""
    return [range(start, min(T, start + BLOCK)) for start in range(0, max(1, T), BLOCK)]


def _is_packed(form: str, q: Tensor, k: Tensor) -> bool:
    """Whether the heads of a group stand below one another, as rows of one head.

    32 heads on 8, width 128, packed over `enable_gqa`, which copies keys and values (Sapphire
    Rapids): one query on 4096 keys 0.34 in float32 and 0.5 in bfloat16, on 16384 0.45 and 0.53; 16
    queries 0.75 and 0.68; from 64 in bfloat16 nothing, and the mask would have to be repeated.
    """
    return form != "causal" and q.shape[1] != k.shape[1] and q.shape[2] <= 32


def _is_wide(q: Tensor, k: Tensor) -> bool:
    """Whether half precision is computed in float32, because that is faster there.

    Forward and backward on Sapphire Rapids, float32 with its casts over half precision: bfloat16
    0.51 at 32 tokens, 0.75 at 128, 1.17 at 192; float16 0.39 at 32, 0.60 at 128, 0.77 at 512.
    """
    if q.device.type != "cpu" or not is_trained(q, k):
        return False
    return q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and q.shape[2] <= 128)


def is_trained(*inputs: Tensor) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
