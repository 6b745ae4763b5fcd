"""Torch's own fused kernel, given the cheapest form of the rule that it takes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from headwise.kernels._rule import Rule
from headwise.masks import Tile, Window


def attend_fused(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    dropout_p: float = 0.0,
) -> Float[Tensor, "B H T Dv"]:
    """The heads, by `scaled_dot_product_attention`."""
    # Torch aligns its causal flag top-left, which is ours only where T equals S.
    flag = rule.visible == Window(None, 0) and rule.bias is None and q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(
        q, k, v,
        attn_mask=None if flag else _dense(q, k, rule),
        dropout_p=dropout_p,
        is_causal=flag,
        scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def _dense(q: Tensor, k: Tensor, rule: Rule) -> Tensor | None:
    whole = Tile.whole(q.shape[2], k.shape[2], q.device)
    visible, bias = rule.visible_in(whole), rule.bias_in(whole)
    if bias is None:
        return visible
    bias = bias.to(q.dtype)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)
