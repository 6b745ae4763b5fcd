"""Torch's own attention kernels, and what its CPU code can use."""

from typing import Any

import torch
from torch import Tensor


def cpu_multiplies_bfloat16_tiles() -> bool:
    """Whether this CPU has AMX; False where this version of torch does not say."""
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return is_supported is not None and bool(is_supported())


def fused_kernel_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> int:
    """Which kernel `scaled_dot_product_attention` would take: a value of `SDPBackend`.

    -1 where this version of torch does not say.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    return -1 if choose is None else int(choose(q, k, v, mask, **options))


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Torch's flash kernel on a CPU: the heads and their log-sum-exp."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads, lse = flash(q, k, v, attn_mask=mask, **options)
    return heads, lse
