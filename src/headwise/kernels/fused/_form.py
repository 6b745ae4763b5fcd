"""In what form torch's kernel takes a rule: its mask, packed heads, and the precision."""

import torch
from torch import Tensor

from headwise._torch_private import needs_gradient, statically
from headwise.kernels.spec import AttentionRule, cpu
from headwise.masks import Window

# Rows in one block: fewer would hide more keys, and take more calls.
BLOCK = 128
# Blocks must leave out a fifth of queries x keys, to pay for their calls.
LARGEST_SHARE = 0.8
# The smallest scale for the causal flag, which multiplies after it has masked: −inf must stay
# −inf, which takes a positive scale that float32 holds in full precision.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Lengths at which blocks are faster than the causal flag: the CPU kernel skips masked keys 512 at
# a time, so that it computes shorter texts whole.
BLOCKS_FROM, BLOCKS_TO = 256, 640
# The same with AMX, where products are fast enough for the calls of blocks to show.
AMX_BLOCKS_FROM, AMX_BLOCKS_TO = 384, 512
# Queries up to which packing pays: with more, the mask would have to be repeated for the group.
MOST_PACKED = 32
# Queries up to which half precision in training is slower than float32 and its casts.
MOST_WIDE = 128
# Queries up to which float16 is not slower forward; AMX is fast in it at any length.
MOST_FLOAT16 = 32
# Heads so wide compute bfloat16 at least as fast as float32, also in blocks.
BROAD_HEAD = 128


def form_of(rule: AttentionRule, q: Tensor, k: Tensor) -> tuple[str, str]:
    """The form of the mask, and why it is the cheapest."""
    T, S = q.shape[2], k.shape[2]
    if rule.visible is None and rule.bias is None:
        return "none", "nothing is hidden"
    # Torch aligns its causal flag top-left, which is ours only where T equals S.
    is_flag = rule.visible == Window(None, 0) and rule.bias is None and T == S
    is_flag = is_flag and rule.scale >= SMALLEST_SCALE
    if is_flag and not _is_faster_in_blocks(q):
        return "causal", "the mask is the kernel's own causal flag"
    share = 1.0 if torch.compiler.is_compiling() else _share(rule, T, S)
    if share < LARGEST_SHARE:
        return "blocks", f"blocks of {BLOCK} rows compute {share:.0%} of queries x keys"
    return ("causal" if is_flag else "dense"), f"blocks of rows would compute {share:.0%}"


def _is_faster_in_blocks(q: Tensor) -> bool:
    """Whether torch's causal flag is slower than blocks of rows."""
    T = q.shape[2]
    if q.device.type != "cpu" or not statically(T >= BLOCKS_FROM):
        return False
    if cpu.HAS_AMX:
        in_range = statically(AMX_BLOCKS_FROM <= T <= AMX_BLOCKS_TO)
        return q.dtype == torch.float32 and in_range and not needs_gradient(q)
    return statically(T <= BLOCKS_TO)


def _share(rule: AttentionRule, T: int, S: int) -> float:
    """The share of queries x keys that blocks of rows compute."""
    blocks = blocks_of(T)
    return sum(len(block) * len(rule.extent(block, T, S)) for block in blocks) / max(1, T * S)


def blocks_of(T: int) -> list[range]:
    """The rows, a block at a time."""
    return [range(start, min(T, start + BLOCK)) for start in range(0, max(1, T), BLOCK)]


def is_packed(form: str, q: Tensor, k: Tensor) -> bool:
    """Whether the heads of a group become rows of one head, so that keys are not copied."""
    return form != "causal" and q.shape[1] != k.shape[1] and statically(q.shape[2] <= MOST_PACKED)


def exceeds_float16(rule: AttentionRule, q: Tensor) -> bool:
    """Whether a bias has values that float16 has not, such as -1e9, so that float32 is needed."""
    if q.device.type != "cpu" or q.dtype != torch.float16 or rule.bias is None:
        return False
    return not rule.bias.fits(q.dtype)


def is_wide(form: str, q: Tensor, k: Tensor) -> bool:
    """Whether half precision is computed in float32, because that is faster."""
    T, D = q.shape[2], q.shape[3]
    if q.device.type != "cpu" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    trained = needs_gradient(q, k)
    if q.dtype == torch.float16:
        return trained or not (cpu.HAS_AMX or statically(T <= MOST_FLOAT16))
    narrow_blocks = form == "blocks" and not cpu.HAS_AMX and D < BROAD_HEAD
    return trained and (
        (narrow_blocks and statically(T <= BLOCKS_TO)) or statically(T <= MOST_WIDE)
    )
