"""Torch's own fused kernel, given the cheapest form of the rule that it takes."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise._torch_private import (
    can_read,
    flash_on_cpu,
    fused_kernel_of,
    needs_gradient,
    statically,
)
from headwise.kernels.fused._form import blocks_of
from headwise.kernels.spec import AttentionProblem, AttentionRule, KernelChoice, Named
from headwise.masks.tiles import Tile


def attend_fused(problem: AttentionProblem, choice: KernelChoice) -> Named:
    """The `heads` by `scaled_dot_product_attention`, in the chosen form.

    If extras are wanted also the `lse`, where the kernel returns it: torch's flash kernel on a
    CPU, without gradients. It is another output of the same pass.
    """
    q, k, v, rule, dropout_p, extras = problem
    if choice.wide:
        q, k, v = q.float(), k.float(), v.float()
    returns_lse = any(extras) and can_read(q, k, v) and not needs_gradient(q, k, v)
    part = _Part(rule, choice, dropout_p, returns_lse)
    if choice.form == "blocks":
        outputs = _attend_blocks(q, k, v, part)
    elif choice.form == "dense":
        outputs = part.attend(q, k, v, Tile.whole(q.shape[2], k.shape[2], q.device))
    else:
        outputs = part.attend(q, k, v, None)
    if choice.wide:
        outputs["heads"] = outputs["heads"].to(problem.q.dtype)
    return outputs


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, part: "_Part") -> Named:
    """The outputs of all blocks of rows, each from the keys that it may see."""
    T, S, parts = q.shape[2], k.shape[2], []
    for rows in blocks_of(T):
        # Rows without visible keys still take a masked one, so that they are part of the graph.
        keys = part.rule.extent(rows, T, S) or range(1)
        block_q = q[:, :, rows.start : rows.stop]
        block_k, block_v = (x[:, :, keys.start : keys.stop] for x in (k, v))
        parts.append(part.attend(block_q, block_k, block_v, Tile(T, S, rows, keys, q.device)))
    return {name: torch.cat([result[name] for result in parts], dim=2) for name in parts[0]}


class _Part(NamedTuple):
    """How a block of rows is computed, against the keys that it may see."""

    rule: AttentionRule
    choice: KernelChoice
    dropout_p: float
    keep_lse: bool

    def attend(
        self,
        q: Float[Tensor, "B H R D"],
        k: Float[Tensor, "B Hkv n D"],
        v: Float[Tensor, "B Hkv n Dv"],
        tile: Tile | None,
    ) -> Named:
        """The outputs; without a tile nothing is masked or added but by the causal flag."""
        visible, added = (None, None) if tile is None else self._masks(tile, q.dtype)
        outputs = (self._call_packed if self.choice.packed else self._call)(q, k, v, added)
        if "lse" in outputs and visible is not None:
            outputs["lse"] = outputs["lse"].masked_fill(~visible.any(-1), -torch.inf)
        return outputs

    def _call_packed(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Named:
        (B, H, R, D), Hkv = q.shape, k.shape[1]
        added = None if added is None else _packed_mask(added, Hkv, H // Hkv, R)
        outputs = self._call(q.reshape(B, Hkv, H // Hkv * R, D), k, v, added)
        return {name: x.reshape(B, H, R, *x.shape[3:]) for name, x in outputs.items()}

    def _call(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Named:
        grouped = not statically(q.shape[1] == k.shape[1])
        options: dict[str, Any] = {
            "is_causal": self.choice.form == "causal",
            "scale": self.rule.scale,
        }
        if self.keep_lse and (added is None or can_read(added)):
            kernel = fused_kernel_of(
                q, k, v, added, dropout_p=self.dropout_p, enable_gqa=grouped, **options
            )
            if kernel == SDPBackend.FLASH_ATTENTION.value:
                heads, lse = flash_on_cpu(q, k, v, _as_floats(added, q.dtype), **options)
                return {"heads": heads, "lse": lse}
        heads = F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=self.dropout_p, enable_gqa=grouped, **options
        )
        return {"heads": heads}

    def _masks(
        self, tile: Tile, dtype: torch.dtype
    ) -> tuple[Bool[Tensor, "#B #H #R #n"] | None, Shaped[Tensor, "#B #H #R #n"] | None]:
        """Which keys are visible, and the mask and bias for the kernel: booleans or floats."""
        visible, bias = self.rule.visible_in(tile), self.rule.bias_in(tile)
        if bias is None:
            return visible, visible
        if dtype == torch.float16 and bias.dtype != dtype:
            # On a CPU it fits, or float32 was chosen; elsewhere an infinity would mask its key.
            highest = torch.finfo(dtype).max
            bias = bias if bias.device.type == "cpu" else bias.clamp(-highest, highest)
        bias = bias.to(dtype)
        return visible, bias if visible is None else torch.where(visible, bias, -torch.inf)


def _as_floats(added: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as floats to be added to the logits: the kernel itself takes no booleans."""
    if added is None or added.dtype != torch.bool:
        return added
    return torch.zeros((), dtype=dtype).expand_as(added).masked_fill(~added, -torch.inf)


def _packed_mask(
    added: Tensor, Hkv: int, groups: int, rows: int
) -> Shaped[Tensor, "#B #Hkv #GR n"]:
    """A mask or bias for packed heads, which are stacked as rows."""
    B, H, R, n = added.shape
    if H > 1:
        return added.expand(B, H, rows, n).reshape(B, Hkv, groups * rows, n)
    return added if R == 1 else added.repeat(1, 1, groups, 1)
