"""Torch's own fused kernel, given the cheapest form of the rule that it takes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise.kernels._choose import Choice, blocks_of
from headwise.kernels._request import Named
from headwise.kernels._rule import Rule
from headwise.masks import Tile, can_look, is_trained, known


def attend_fused(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S Dv"],
    rule: Rule,
    choice: Choice,
    dropout_p: float = 0.0,
    keep_lse: bool = False,
) -> Named:
    """The `heads`, by `scaled_dot_product_attention`, in the form that was chosen.

    With `keep_lse` also the `lse`, where the kernel tells it: torch's flash kernel on a CPU,
    without gradients. It is another output of the same pass.
    """
    dtype, (T, S) = q.dtype, (q.shape[2], k.shape[2])
    if choice.wide:
        q, k, v = q.float(), k.float(), v.float()
    told = keep_lse and can_look(q, k, v) and not is_trained(q, k, v)
    part = _Part(rule, choice, dropout_p, told)
    if choice.form != "blocks":
        found = part.attend(q, k, v, Tile.whole(T, S, q.device))
        return found | {"heads": found["heads"].to(dtype)}
    parts = []
    for rows in blocks_of(T):
        # Rows that see nothing still take one key, hidden, so that gradients have a way back.
        keys = rule.extent(rows, T, S) or range(1)
        some_q = q[:, :, rows.start : rows.stop]
        some_k, some_v = (x[:, :, keys.start : keys.stop] for x in (k, v))
        parts.append(part.attend(some_q, some_k, some_v, Tile(T, S, rows, keys, q.device)))
    found = {name: torch.cat([one[name] for one in parts], dim=2) for name in parts[0]}
    return found | {"heads": found["heads"].to(dtype)}


@dataclass(frozen=True)
class _Part:
    """How some rows are computed, against the keys that they may see."""

    rule: Rule
    choice: Choice
    dropout_p: float
    keep_lse: bool

    def attend(
        self,
        q: Float[Tensor, "B H R D"],
        k: Float[Tensor, "B Hkv n D"],
        v: Float[Tensor, "B Hkv n Dv"],
        tile: Tile,
    ) -> Named:
        B, H, R, D = q.shape
        Hkv, packed = k.shape[1], self.choice.packed
        visible, added = self._masks(tile, q.dtype)
        if packed:
            q = q.reshape(B, Hkv, H // Hkv * R, D)
            added = None if added is None else _packed(added, Hkv, H // Hkv, R)
        found = self._call(q, k, v, added)
        if packed:
            found = {name: x.reshape(B, H, R, *x.shape[3:]) for name, x in found.items()}
        if "lse" in found and visible is not None:
            found["lse"] = found["lse"].masked_fill(~visible.any(-1), -torch.inf)
        return found

    def _call(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Named:
        grouped = not known(q.shape[1] == k.shape[1])
        how: dict[str, Any] = {
            "is_causal": self.choice.form == "causal",
            "scale": self.rule.scale,
        }
        if self.keep_lse and (added is None or can_look(added)):
            # There is no public way to ask for the log-sum-exp, nor which kernel would be taken.
            taken = torch._fused_sdp_choice(
                q, k, v, added, self.dropout_p, enable_gqa=grouped, **how
            )
            if taken == SDPBackend.FLASH_ATTENTION.value:
                flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                heads, lse = flash(q, k, v, attn_mask=_as_floats(added, q.dtype), **how)
                return {"heads": heads, "lse": lse}
        heads = F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=self.dropout_p, enable_gqa=grouped, **how
        )
        return {"heads": heads}

    def _masks(
        self, tile: Tile, dtype: torch.dtype
    ) -> tuple[Bool[Tensor, "#B #H #R #n"] | None, Shaped[Tensor, "#B #H #R #n"] | None]:
        """What is visible, and mask and bias as the kernel takes them: booleans or floats."""
        if self.choice.form not in ("blocks", "dense"):
            return None, None
        visible, bias = self.rule.visible_in(tile), self.rule.bias_in(tile)
        if bias is None:
            return visible, visible
        if dtype == torch.float16 and bias.dtype != dtype:
            # On a CPU it is known to fit; elsewhere an infinity would hide its key, or be NaN.
            highest = torch.finfo(dtype).max
            bias = bias if bias.device.type == "cpu" else bias.clamp(-highest, highest)
        bias = bias.to(dtype)
        return visible, bias if visible is None else torch.where(visible, bias, -torch.inf)


def _as_floats(added: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the logits: the kernel itself takes no booleans."""
    if added is None or added.dtype != torch.bool:
        return added
    return torch.zeros((), dtype=dtype).expand_as(added).masked_fill(~added, -torch.inf)


def _packed(added: Tensor, Hkv: int, groups: int, rows: int) -> Shaped[Tensor, "#B #Hkv #GR n"]:
    """The same for heads that stand below one another, each with its rows."""
    B, H, R, n = added.shape
    if H > 1:
        return added.expand(B, H, rows, n).reshape(B, Hkv, groups * rows, n)
    return added if R == 1 else added.repeat(1, 1, groups, 1)
