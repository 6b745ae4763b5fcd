"""Which kernel computes, on what form of the mask, and why: one rule in one place.

Times are ratios on one thread of two CPUs, medians of interleaved repeats: Zen 4 (AVX-512 with
bfloat16 products) and Sapphire Rapids (which has AMX). Width 64, 12 heads, where nothing else is
said. `benchmarks/layer.py` takes those of whole layers again.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from headwise.errors import ArgumentError
from headwise.kernels import triton
from headwise.kernels._bias import Bias
from headwise.kernels._rule import Rule
from headwise.kernels.native import cannot, is_packed
from headwise.masks import Tile, Window, in_func_gradient, is_trained, known, settled

BACKENDS = ("auto", "fused", "rows", "native", "triton")
_PACKED = "the heads of a group are packed, so that keys and values are read once"
# The smallest scale for torch's causal flag: what float32 holds in full precision.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Rows in one block, where blocks skip the keys that none of their rows may attend to.
BLOCK = 128
# Whether this CPU multiplies tiles of bfloat16. There is no public way to ask.
HAS_AMX: bool = torch.cpu._is_amx_tile_supported()


class Choice(NamedTuple):
    """The kernel that computes, what it is given, and the reasons."""

    backend: str  # "native", "triton", "fused" or "rows"
    form: str  # of the mask: "none", "causal" (the kernel's own flag), "blocks" or "dense"
    packed: bool  # the heads of a group as rows of one head, so that keys are read once
    wide: bool  # half precision computed in float32
    reason: str


def choose(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str = "auto",
    dropout_p: float = 0.0,
) -> Choice:
    """Pick what computes `attend` of these inputs: of their numbers nothing is read.

    The native kernel where it is faster; else torch's fused kernel unless it cannot follow the
    rule, given the cheapest form of the mask. The kernel in Triton, which was never measured, only
    by name.

    Raises:
        ArgumentError: the name is unknown, or that kernel cannot do this.
    """
    if backend not in BACKENDS:
        raise ArgumentError(
            f"attend: backend={backend!r} is not known. Choose one of {', '.join(BACKENDS)}."
        )
    form = "none" if rule.visible is None else "blocks"
    if backend in ("auto", "native"):
        why = _native(rule, (q, k, v), backend, dropout_p)
        if why is not None:
            packed = q.shape[1] != k.shape[1] and is_packed(q.shape[2], q, k, v, rule.sinks)
            why = f"{why}; {_PACKED}" if packed else why
            return Choice("native", form, packed, wide=q.dtype != torch.float32, reason=why)
    if backend == "triton":
        if reason := _not_triton(rule, (q, k, v), dropout_p):
            raise _refusal(backend, reason)
        return Choice(backend, form, False, wide=True, reason="asked for by name")
    kernel, why = _kernel(rule, backend)
    if kernel == "rows":
        return Choice(kernel, form, packed=True, wide=True, reason=why)
    form, what = _form(rule, q, k)
    packed, wide, exceeds = _is_packed(form, q, k), _is_wide(form, q, k), _exceeds(rule, q)
    if not (packed or wide or exceeds):
        return Choice(kernel, form, packed, wide, f"{why}; {what}")
    reasons = [why, what]
    if packed:
        reasons.append(_PACKED)
    if exceeds:
        reasons.append(f"its bias is too large for {q.dtype}")
    elif wide:
        reasons.append(f"it is slower in {q.dtype} than in float32")
    return Choice(kernel, form, packed, wide or exceeds, "; ".join(reasons))


def _native(
    rule: Rule, inputs: tuple[Tensor, Tensor, Tensor], backend: str, dropout_p: float
) -> str | None:
    """Why the native kernel computes this; None: it does not, and need not."""
    q, k, v = inputs
    if backend == "auto" and not _is_won(q, k):
        return None
    reason = _has_no(rule, inputs, dropout_p) or cannot(q, k, v, rule)
    if reason is None:
        return "asked for by name" if backend == "native" else "the native kernel is faster"
    if backend == "auto":
        return None
    raise _refusal(backend, reason)


def _not_triton(rule: Rule, inputs: tuple[Tensor, Tensor, Tensor], dropout_p: float) -> str | None:
    """Why the kernel in Triton does not compute this; None: it does."""
    learned = inputs if rule.sinks is None else (*inputs, rule.sinks)
    if is_trained(*learned):
        return "it has no gradients"
    return _has_no(rule, inputs, dropout_p) or triton.cannot(*inputs, rule)


def _refusal(backend: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"attend: backend={backend!r} cannot compute this: {reason}. "
        f"Use backend='auto' to let attend choose."
    )


def _has_no(rule: Rule, inputs: tuple[Tensor, Tensor, Tensor], dropout_p: float) -> str | None:
    """What is asked of a kernel of ours that it does not have."""
    if dropout_p:
        return f"it has no dropout (dropout_p={dropout_p})"
    if rule.bias is not None and _is_learned(rule.bias, *inputs[:2]):
        return "it has no gradients of a bias"
    if forward_ad._current_level >= 0:  # there is no public way to ask
        return "it has no forward-mode gradients"
    if in_func_gradient():
        return "it has no gradients by torch.func"
    return None


def _is_learned(bias: Bias, q: Tensor, k: Tensor) -> bool:
    return is_trained(bias.tile(Tile.corner(q.shape[2], k.shape[2])))


def _is_won(q: Tensor, k: Tensor) -> bool:
    """Whether the native kernel is faster than torch's, if it can compute this.

    What a call takes in Python must be gained, more of it in training. Over torch's, full and
    causal: 12 heads at 16, 32, 40, 64 and 128 tokens 1.08 .79, 1.02 .75, .86 .51, .73 .69, .84 .54,
    2 heads at 64 and 128 1.19 .92, .88 .61, 8 texts at 8 and 16 tokens .81 .61, .78 .61, 16 queries
    on 1024 keys .64 .51. bfloat16 of 12 heads at 16, 32 and 48 tokens .96 .68, .63 .60, .54 .46,
    of 2 at 64 .64 .57; float16 there .71 .42, .63 .43, .80 .62, 1.08 .66. Trained, at 48, 64, 96,
    128 and 512 tokens float32 1.12 .90, 1.21 .96, .99 .76, .91 .68, .79 .52, bfloat16 .81 .72,
    .80 .64, .74 .68, .66 .54, .45 .32, float16 1.05 .84, .92 .96, .84 .79, .87 .66, .77 .47, and
    at 32 all three up to 1.3. Longer ones: `benchmarks/native.py`. One query from memory, over
    torch's kernel with packed heads: 32 heads on 8, width 128, at 16, 32, 64 and 128 keys 1.03 .94
    .79 .72 (1.17 1.11 .97 .89 from a cache), bfloat16 at 16 and 64 .97 .75; 12 heads at 128, 256,
    512 and 4096 keys 1.07 1.00 .95 .96, bfloat16 at 16, 32 and 64 1.02 .81 .60, float16 at 16 .72;
    trained it is unmeasured. With AMX half precision is unmeasured.
    """
    # An exported program is for other places, where the native kernel may not be.
    if torch.compiler.is_exporting() or q.dtype == torch.float64:
        return False
    single = q.dtype == torch.float32
    if HAS_AMX and not single:
        return False
    B, H, T, D = q.shape
    if is_packed(T, q, k):
        least = (18 if k.shape[1] == H else 16) if single else 14
        return k.numel() >= _n_threads() << least
    least = (20 if single else 19) + (2 if is_trained(q, k) else 0)
    return T >= 8 and B * H * T * k.shape[2] * D >= _n_threads() << least


@settled
def _n_threads() -> int:
    return torch.get_num_threads()


def _kernel(rule: Rule, backend: str) -> tuple[str, str]:
    if backend == "rows":
        return "rows", "asked for by name"
    if rule.needs_double:
        if backend == "fused":
            raise _refusal(
                backend, f"at scale={rule.scale:g} logits need float64, which is left to the rows"
            )
        return "rows", f"at scale={rule.scale:g} logits need float64, which is left to the rows"
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
    # Torch multiplies by the scale after it has masked: −inf must stay −inf, in float32 too.
    is_flag = rule.visible == Window(None, 0) and rule.bias is None and T == S
    is_flag = is_flag and rule.scale >= SMALLEST_SCALE
    if is_flag and not _computes_hidden(q):
        return "causal", "the mask is the kernel's own causal flag"
    share = 1.0 if torch.compiler.is_compiling() else _share(rule, T, S)
    if share < 0.8:
        return "blocks", f"blocks of {BLOCK} rows look at {share:.0%} of queries x keys"
    return ("causal" if is_flag else "dense"), f"blocks of rows would look at {share:.0%}"


def _computes_hidden(q: Tensor) -> bool:
    """Whether torch's causal flag costs more than blocks of rows.

    On a CPU the kernel skips hidden keys 512 at a time, so that short texts are computed whole.
    Blocks over flag, for 256, 384, 512, 640, 768 and 1024 tokens:
    without AMX float32 .94 .81 .76 .82 .98 .97, its training .99 .88 .86 .89 .95 1.00,
    bfloat16 .95 .84 .80 .91 1.01 1.02, its training (with what `_is_wide` says) .80 .79 .77 .90
    1.07 1.09; with AMX float32 at 256, 512, 1024 1.09 .94 1.11, its training 1.05 and bfloat16
    1.15 at 512.
    """
    T = q.shape[2]
    if q.device.type != "cpu" or not known(T >= 256):
        return False
    if HAS_AMX:
        return q.dtype == torch.float32 and known(384 <= T <= 512) and not is_trained(q)
    return known(T <= 640)


def _share(rule: Rule, T: int, S: int) -> float:
    """The share of queries x keys that blocks of rows look at."""
    blocks = blocks_of(T)
    return sum(len(block) * len(rule.extent(block, T, S)) for block in blocks) / max(1, T * S)


def blocks_of(T: int) -> list[range]:
    """The rows, a block at a time."""
    return [range(start, min(T, start + BLOCK)) for start in range(0, max(1, T), BLOCK)]


def _is_packed(form: str, q: Tensor, k: Tensor) -> bool:
    """Whether the heads of a group stand below one another, as rows of one head.

    32 heads on 8, width 128, packed over `enable_gqa`, which copies keys and values. One query on
    4096 and 16384 keys: without AMX float32 .50 .33, bfloat16 .12 .11, float16 .27 .27; with AMX
    float32 .34 .45, bfloat16 .50 .53. There 16 queries take .75 and .68; from 64 on nothing is
    gained, and the mask would have to be repeated.
    """
    return form != "causal" and q.shape[1] != k.shape[1] and known(q.shape[2] <= 32)


def _exceeds(rule: Rule, q: Tensor) -> bool:
    """Whether a bias has numbers that float16 has not, such as -1e9, so that float32 is needed."""
    if q.device.type != "cpu" or q.dtype != torch.float16 or rule.bias is None:
        return False
    return not rule.bias.fits(q.dtype)


def _is_wide(form: str, q: Tensor, k: Tensor) -> bool:
    """Whether half precision is computed in float32, because that is faster there.

    Float32 with its casts over half precision, forward and backward. bfloat16 at 32, 128, 192 and
    256 tokens: without AMX .39 .63 .94 .99, with AMX .51 .75 1.17; blocks under a causal mask,
    over its flag, without AMX at 256, 384, 512 .80 .79 .77; 32 heads of width 128 .78 at 32, .88
    to 1.06 at 128, 1.3 at 256, blocks or none. float16 without AMX .12 at 512, with AMX .77;
    forward alone without AMX .36 to .57, but 1.1 to 1.6 for one packed query on 4096 keys and more.
    """
    T, D = q.shape[2], q.shape[3]
    if q.device.type != "cpu" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    trained = is_trained(q, k)
    if q.dtype == torch.float16:
        return trained or not (HAS_AMX or known(T <= 32))
    in_blocks = form == "blocks" and not HAS_AMX and D < 128 and known(T <= 640)
    return trained and (in_blocks or known(T <= 128))
