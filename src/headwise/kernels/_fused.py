"""Torch's own fused kernel, given the cheapest form of the rule that it takes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from headwise.kernels._choose import Choice, blocks_of
from headwise.kernels._rule import Rule
from headwise.masks import Tile


def attend_fused(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    choice: Choice,
    dropout_p: float = 0.0,
) -> Float[Tensor, "B H T Dv"]:
    """The heads, by `scaled_dot_product_attention`, in the form that was chosen."""
    dtype, (T, S) = q.dtype, (q.shape[2], k.shape[2])
    if choice.wide:
        q, k, v = q.float(), k.float(), v.float()
    if choice.form != "blocks":
        return _of_tile(q, k, v, rule, choice, dropout_p, Tile.whole(T, S, q.device)).to(dtype)
    parts = []
    for rows in blocks_of(T):
        # Rows that see nothing still take one key, hidden, so that gradients have a way back.
        keys = rule.extent(rows, T, S) or range(1)
        part = q[:, :, rows.start : rows.stop]
        some_k, some_v = (x[:, :, keys.start : keys.stop] for x in (k, v))
        tile = Tile(T, S, rows, keys, q.device)
        parts.append(_of_tile(part, some_k, some_v, rule, choice, dropout_p, tile))
    return torch.cat(parts, dim=2).to(dtype)


def _of_tile(
    q: Float[Tensor, "B H R D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    rule: Rule,
    choice: Choice,
    dropout_p: float,
    tile: Tile,
) -> Float[Tensor, "B H R Dv"]:
    """Some rows, against the keys that they may see."""
    B, H, R, D = q.shape
    Hkv = k.shape[1]
    added = _added(rule, tile, q.dtype) if choice.form in ("blocks", "dense") else None
    if choice.packed:
        q = q.reshape(B, Hkv, H // Hkv * R, D)
        added = None if added is None else _packed(added, Hkv, H // Hkv, R)
    heads = F.scaled_dot_product_attention(
        q, k, v,
        attn_mask=added,
        dropout_p=dropout_p,
        is_causal=choice.form == "causal",
        scale=rule.scale,
        enable_gqa=Hkv != H and not choice.packed,
    )  # fmt: skip
    return heads.reshape(B, H, R, v.shape[-1]) if choice.packed else heads


def _added(rule: Rule, tile: Tile, dtype: torch.dtype) -> Tensor | None:
    """Mask and bias of a tile as the kernel takes them: booleans, or what is added to logits."""
    visible, bias = rule.visible_in(tile), rule.bias_in(tile)
    if bias is None:
        return visible
    bias = bias.to(dtype)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def _packed(added: Tensor, Hkv: int, groups: int, rows: int) -> Shaped[Tensor, "#B #Hkv #GR n"]:
    """The same for heads that stand below one another, each with its rows."""
    B, H, R, n = added.shape
    if H > 1:
        return added.expand(B, H, rows, n).reshape(B, Hkv, groups * rows, n)
    return added if R == 1 else added.repeat(1, 1, groups, 1)
