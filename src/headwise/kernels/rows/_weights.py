"""Weights from the log-sum-exp of a kernel: one product, written to its final place."""

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.kernels.rows._cells import LOG2E
from headwise.kernels.spec import AttentionRule
from headwise.masks.tiles import Tile

# Entries and rows of one block, which stays in the cache of one core.
BLOCK, ROWS = 1 << 19, 256


def weights_from_lse(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    rule: AttentionRule,
    lse: Float[Tensor, "B H T"],
    wide: bool,
) -> Float[Tensor, "B H T S"]:
    """`exp(logits - lse)`, a block of rows at a time; zeros in a row without keys.

    It takes two thirds of the time of `attend_rows`, which finds each row's maximum first.

    Without gradients, for a rule without softcap. Half precisions are computed in float32,
    with the bias that the kernel added: in `wide` arithmetic as it is, else rounded.
    """
    B, H, T, _ = q.shape
    S, groups = k.shape[2], H // k.shape[1]
    kind = torch.promote_types(q.dtype, torch.float32)
    # Zeros cost nothing where they are not touched: at keys that no row of a block sees.
    weights = torch.zeros(B, H, T, S, dtype=kind, device=q.device)
    lse = torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1) * LOG2E
    n_heads = max(1, BLOCK // max(1, min(T, ROWS) * S))
    for text in range(B):
        queries, keys = q[text].to(kind) * (rule.scale * LOG2E), k[text].to(kind)
        keys = keys if groups == 1 else keys.repeat_interleave(groups, dim=0)
        for start in range(0, T, ROWS):
            rows = range(start, min(T, start + ROWS))
            seen = rule.extent(rows, T, S)
            tile = Tile(T, S, rows, seen, q.device)
            region = slice(rows.start, rows.stop), slice(seen.start, seen.stop)
            for first in range(0, H, n_heads):
                heads = slice(first, first + n_heads)
                block = weights[text, heads, *region]
                torch.bmm(queries[heads, region[0]], keys[heads, region[1]].mT, out=block)
                which = slice(text, text + 1), heads
                bias, visible = rule.bias_in(tile, *which), rule.visible_in(tile, *which)
                if bias is not None:
                    added = bias[0] if wide else bias[0].to(q.dtype)
                    block.add_(added, alpha=LOG2E)
                block.sub_(lse[text, heads, region[0]]).exp2_()
                if visible is not None:
                    block.masked_fill_(~visible[0], 0.0)
                # Otherwise the rounding of `lse` would be the largest error of a weight.
                total = block.sum(-1, keepdim=True)
                block.div_(total.masked_fill_(total == 0, 1.0))
    return weights
