"""Capture `nn.MultiheadAttention`, and keep it on the path where it can be captured."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise._torch_private import has_joined_weight
from headwise.capture._call import AttentionCall
from headwise.capture._capture import Capture
from headwise.errors import UnsupportedError
from headwise.kernels import make_rule
from headwise.masks import Mask, as_mask, from_blocked


@torch.no_grad()
def capture_torch_layer(
    capture: Capture,
    module: nn.MultiheadAttention,
    args: Any,
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Capture a call of torch's own layer, from its inputs and its output."""
    if not capture.is_active:
        return
    names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedError(
            "observe: nn.MultiheadAttention with add_bias_kv or add_zero_attn attends to a key "
            "that is not a token. Disable it, or convert with "
            "headwise.MultiHeadAttention.from_torch."
        )
    inputs = capture.detach(*(arguments[name] for name in names[:3]), output[0])
    query, key, value, out = (_batched(x, module) for x in inputs)
    q, k, v = _projected(module, query, key, value)
    padding = arguments.get("key_padding_mask")
    real = None if padding is None else _real(padding)
    mask = _mask(arguments.get("attn_mask"), real, q, k)
    capture.on_call(
        AttentionCall(
            module=module,
            q=q, k=k, v=v,
            rule=make_rule(head_dim=module.head_dim, mask=mask, is_added=True),
            heads=out[:, None],
            join=partial(_join, module.out_proj),
            watched="a hook on the module",
            kernel="nn.MultiheadAttention, outside its fast path",
            exact=not (module.training and module.dropout),
            cross=arguments["key"] is not arguments["query"],
            real=real,
        )
    )  # fmt: skip


def _join(out_proj: nn.Linear, heads: Tensor) -> Float[Tensor, "B 1 T d_model"]:
    # The module itself is not called, so that other hooks on it do not run.
    joined = heads.transpose(1, 2).flatten(2)
    return F.linear(joined, out_proj.weight, out_proj.bias)[:, None]


def _batched(x: Tensor, module: nn.MultiheadAttention) -> Float[Tensor, "B T d_model"]:
    if x.ndim == 2:
        return x[None]
    return x if module.batch_first else x.transpose(0, 1)


def _projected(
    module: nn.MultiheadAttention, *inputs: Float[Tensor, "B _ _"]
) -> list[Float[Tensor, "B H T D"]]:
    """Queries, keys and values, computed again: the layer does not return its own."""
    if has_joined_weight(module):
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    return [
        F.linear(x, weight, bias).view(*x.shape[:2], module.num_heads, -1).transpose(1, 2)
        for x, weight, bias in zip(inputs, weights, biases, strict=True)
    ]


def _real(padding: Tensor) -> Bool[Tensor, "B S"]:
    """Which keys are not padding. In torch's layer True, or minus infinity, marks padding."""
    padding = padding if padding.ndim == 2 else padding[None]
    return ~padding if padding.dtype == torch.bool else padding > torch.finfo(padding.dtype).min


def _mask(
    mask: Tensor | None, real: Bool[Tensor, "B S"] | None, q: Tensor, k: Tensor
) -> Tensor | Mask | None:
    """Mask and padding combined. In a boolean mask of torch's layer, True blocks a key."""
    if mask is not None and mask.ndim == 3:  # texts and heads share the first axis
        mask = mask.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if real is None:
        if mask is None or mask.is_floating_point():
            return mask
        return from_blocked(mask)
    visible = as_mask(real[:, None, None, :])
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return from_blocked(mask) & visible
    return mask.masked_fill(~real[:, None, None, :], -torch.inf)
