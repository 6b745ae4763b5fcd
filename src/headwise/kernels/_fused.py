"""Torch's own fused kernel, given the cheapest form of a rule that it takes."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

from headwise._torch_private import needs_gradient, statically
from headwise.kernels import cpu
from headwise.kernels._contract import (
    PACKED,
    AttentionKernel,
    AttentionProblem,
    ComputeHeads,
    KernelChoice,
    Named,
    RowRequest,
    is_finite,
)
from headwise.kernels._rule import AttentionRule
from headwise.masks import Window
from headwise.masks.tiles import Tile

# Rows in one block: fewer would hide more keys, and take more calls.
BLOCK = 128
# Blocks must leave out a fifth of queries x keys, to pay for their calls.
LARGEST_SHARE = 0.8
# The smallest scale for the causal flag, which multiplies after it has masked: −inf must stay
# −inf, which takes a positive scale that float32 holds in full precision.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Queries up to which packing pays: with more, the mask would have to be repeated for the group.
MOST_PACKED = 32
# Queries up to which half precision in training is slower than float32 and its casts.
MOST_WIDE = 128
# Queries up to which float16 is not slower forward; AMX is fast in it at any length.
MOST_FLOAT16 = 32


def form_of(rule: AttentionRule, q: Tensor, k: Tensor) -> tuple[str, str]:
    """The form of the mask, and why it is the cheapest."""
    T, S = q.shape[2], k.shape[2]
    if rule.visible is None and rule.bias is None:
        return "none", "nothing is hidden"
    # Torch aligns its causal flag top-left, which is ours only where T equals S.
    is_flag = rule.visible == Window(None, 0) and rule.bias is None and T == S
    if is_flag and rule.scale >= SMALLEST_SCALE:
        return "causal", "the mask is the kernel's own causal flag"
    share = 1.0
    if not torch.compiler.is_compiling():
        computed = sum(len(rows) * len(rule.extent(rows, T, S)) for rows in blocks_of(T))
        share = computed / max(1, T * S)
    if share < LARGEST_SHARE:
        return "blocks", f"blocks of {BLOCK} rows compute {share:.0%} of queries x keys"
    return "dense", f"blocks of rows would compute {share:.0%}"


def blocks_of(T: int) -> list[range]:
    """The rows, a block at a time."""
    return [range(start, min(T, start + BLOCK)) for start in range(0, max(1, T), BLOCK)]


def is_wide(q: Tensor, k: Tensor) -> bool:
    """Whether half precision is computed in float32, because that is faster."""
    if q.device.type != "cpu" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    trained, T = needs_gradient(q, k), q.shape[2]
    if q.dtype == torch.float16:
        return trained or not (cpu.HAS_AMX or statically(T <= MOST_FLOAT16))
    return trained and statically(T <= MOST_WIDE)


class FusedKernel(AttentionKernel):
    """`scaled_dot_product_attention`: it has no softcap, no sinks, and no statistics of rows."""

    name = "fused"

    def why_not(self, problem: AttentionProblem, request: RowRequest | None = None) -> str | None:
        rule = problem.rule
        if request is not None:
            return "it has no statistics of rows"
        if rule.needs_double:
            return f"at scale={rule.scale:g} logits need float64, which is left to the rows"
        missing = [name for name in ("softcap", "sinks") if getattr(rule, name) is not None]
        if missing:
            return f"it has no {' and no '.join(missing)}"
        if problem.dropout_p and any(problem.extras):
            return f"it does not return which weights it drops (dropout_p={problem.dropout_p})"
        return None

    def plan(self, problem: AttentionProblem, reason: str) -> KernelChoice:
        q, k, _, rule, *_ = problem
        form, why_form = form_of(rule, q, k)
        reason = f"{reason}; {why_form}"
        few = statically(q.shape[2] <= MOST_PACKED)
        packed = form != "causal" and q.shape[1] != k.shape[1] and few
        if packed:
            reason = f"{reason}; {PACKED}"
        # A bias may have values that float16 has not, such as -1e9.
        is_half = q.dtype == torch.float16 and q.device.type == "cpu"
        exceeds = is_half and rule.bias is not None and not rule.bias.fits(q.dtype)
        wide = is_wide(q, k)
        if exceeds:
            reason = f"{reason}; its bias is too large for {q.dtype}"
        elif wide:
            reason = f"{reason}; it is slower in {q.dtype} than in float32"
        return KernelChoice(self.name, form, packed, wide or exceeds, reason)

    def attend(self, problem: AttentionProblem, choice: KernelChoice) -> Named:
        """The `heads` by `scaled_dot_product_attention`, in the chosen form."""
        q, k, v, rule, *_ = problem
        T, S, dtype = q.shape[2], k.shape[2], q.dtype
        if choice.wide:
            q, k, v = q.float(), k.float(), v.float()
            problem = problem._replace(q=q, k=k, v=v)
        if choice.form == "blocks":
            blocks = []
            for rows in blocks_of(T):
                # Rows without visible keys take a masked one, so that they are part of the graph.
                keys = rule.extent(rows, T, S) or range(1)
                block_k, block_v = (x[:, :, keys.start : keys.stop] for x in (k, v))
                block = problem._replace(q=q[:, :, rows.start : rows.stop], k=block_k, v=block_v)
                blocks.append(_attend_tile(block, choice, Tile(T, S, rows, keys, q.device)))
            heads = torch.cat(blocks, dim=2)
        else:
            tile = Tile.whole(T, S, q.device) if choice.form == "dense" else None
            heads = _attend_tile(problem, choice, tile)
        return {"heads": heads.to(dtype)}

    def prepare(self, problem: AttentionProblem, choice: KernelChoice) -> ComputeHeads | None:
        q, k, v, rule, *_ = problem
        if choice.form not in ("none", "causal") or choice.wide:
            return None
        compute = partial(
            F.scaled_dot_product_attention, is_causal=choice.form == "causal", scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        if choice.packed:
            (B, H, T, D), Hkv = q.shape, k.shape[1]
            rows, shape = (B, Hkv, H // Hkv * T, D), (B, H, T, v.shape[3])
            return lambda q, k, v: compute(q.reshape(rows), k, v).reshape(shape)
        if choice.form == "none":
            return compute
        if needs_gradient(q, k, v) or not q.is_cpu:
            return None

        def compute_finite(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
            heads = compute(q, k, v)
            # A value that gets through a causal flag gets into the last row.
            return heads if is_finite(heads.select(2, -1)) else None

        return compute_finite


def _attend_tile(problem: AttentionProblem, choice: KernelChoice, tile: Tile | None) -> Tensor:
    """The heads of a tile; without one nothing is masked or added but by the causal flag."""
    q, k, v, rule, dropout_p, _ = problem
    (B, H, R, D), Hkv = q.shape, k.shape[1]
    mask = None if tile is None else _mask(rule, tile, q.dtype)
    if choice.packed:  # the heads of a group are stacked as rows
        q = q.reshape(B, Hkv, H // Hkv * R, D)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.expand(-1, H, R, -1).reshape(len(mask), *q.shape[1:3], mask.shape[3])
        elif mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, H // Hkv, 1)
    heads = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=choice.form == "causal",
        scale=rule.scale, enable_gqa=not statically(q.shape[1] == Hkv),
    )  # fmt: skip
    return heads.reshape(B, H, R, v.shape[3]) if choice.packed else heads


def _mask(
    rule: AttentionRule, tile: Tile, dtype: torch.dtype
) -> Shaped[Tensor, "#B #H #R #n"] | None:
    """The mask and bias of a tile for the kernel: booleans or floats."""
    visible, bias = rule.visible_in(tile), rule.bias_in(tile)
    if bias is None:
        return visible
    if dtype == torch.float16 and bias.dtype != dtype:
        # On a CPU it fits, or float32 was chosen; elsewhere an infinity would mask its key.
        highest = torch.finfo(dtype).max
        bias = bias if bias.device.type == "cpu" else bias.clamp(-highest, highest)
    bias = bias.to(dtype)
    return bias if visible is None else torch.where(visible, bias, -torch.inf)


FUSED = FusedKernel()
