"""Checks of the layer's arguments: sizes, parts, inputs and caches."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise._torch_private import under_autocast
from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import WindowLike
from headwise.layer._biases import PositionBias
from headwise.layer._cache import KVCache
from headwise.layer._positions import RoPE
from headwise.shapes import is_size

_EXAMPLES = {"rope": "RoPE(head_dim)", "position_bias": "ALiBi(n_heads)"}


class Sizes(NamedTuple):
    """All sizes of a layer, defaults resolved."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    kdim: int
    vdim: int


def read_sizes(d_model: int, n_heads: int, *optional: int | None) -> Sizes:
    """Resolve the default sizes; refuse sizes that are not positive or do not divide."""
    sizes = dict(zip(Sizes._fields, (d_model, n_heads, *optional), strict=True))
    for name, size in sizes.items():
        if size is not None and not is_size(size):
            raise ArgumentError(
                f"MultiHeadAttention: {name}={size!r}. Give a positive whole number."
            )
    n_kv_heads, head_dim, v_head_dim, kdim, vdim = optional
    if head_dim is None and d_model % n_heads:
        raise ShapeError(
            f"MultiHeadAttention: d_model={d_model} cannot be shared by n_heads={n_heads} "
            f"evenly. Make it a multiple, or give head_dim."
        )
    if n_heads % (n_kv_heads or n_heads):
        raise ShapeError(
            f"MultiHeadAttention: n_heads={n_heads} cannot share n_kv_heads={n_kv_heads} "
            f"evenly. Make n_heads a multiple of n_kv_heads."
        )
    head_dim, kdim = head_dim or d_model // n_heads, kdim or d_model
    return Sizes(
        d_model,
        n_heads,
        n_kv_heads or n_heads,
        head_dim,
        v_head_dim or head_dim,
        kdim,
        vdim or kdim,
    )


def read_bias(bias: bool | str) -> tuple[bool, bool]:
    """Whether the query, key and value projections have biases, and whether the others do."""
    if bias is True or bias is False:
        return bias, bias
    if bias != "qkv":
        raise ArgumentError(f"MultiHeadAttention: bias={bias!r}. Give True, False or 'qkv'.")
    return True, False


def check_parts(
    sizes: Sizes,
    rope: RoPE | None,
    position_bias: PositionBias | None,
    sinks: Tensor | float | None,
) -> None:
    """Refuse parts of the wrong type or made for other sizes."""
    for name, part, kind in ("rope", rope, RoPE), ("position_bias", position_bias, PositionBias):
        if not isinstance(part, kind | None):
            raise ArgumentError(
                f"MultiHeadAttention: {name}={part!r} is not of type {kind.__name__}. "
                f"Give one, such as {_EXAMPLES[name]}, or None."
            )
    if rope is not None and rope.width > sizes.head_dim:
        raise ShapeError(
            f"MultiHeadAttention: rope rotates {rope.width} features of heads with "
            f"head_dim={sizes.head_dim}. Give RoPE a width up to {sizes.head_dim}."
        )
    if position_bias is not None and position_bias.n_heads != sizes.n_heads:
        raise ShapeError(
            f"MultiHeadAttention: position_bias is for {position_bias.n_heads} heads where "
            f"n_heads={sizes.n_heads}. Make it for {sizes.n_heads}."
        )
    if isinstance(sinks, Tensor) and sinks.shape != (sizes.n_heads,):
        raise ShapeError(
            f"MultiHeadAttention: sinks {tuple(sinks.shape)} for n_heads={sizes.n_heads}. "
            f"Give one logit for each head, or one number for all."
        )


def check_inputs(inputs: Mapping[str, Tensor], widths: Sequence[int], like: nn.Module) -> None:
    """Refuse inputs whose width, dtype or device differs from the layer's."""
    for (name, x), width in zip(inputs.items(), widths, strict=True):
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"MultiHeadAttention: {name} is a {type(x).__name__}. Give a tensor of floats."
            )
        if x.ndim != 3 or x.shape[-1] != width:
            raise ShapeError(
                f"MultiHeadAttention: {name} {tuple(x.shape)}. "
                f"Give [batch, tokens, {width}]; the layer was made for that width."
            )
    kinds = {name: (x.dtype, x.device) for name, x in inputs.items()}
    # Adapters and quantized weights accept dtypes of their own; autocast unifies dtypes.
    if type(like) is nn.Linear:
        kinds["weights"] = (like.weight.dtype, like.weight.device)
    if under_autocast(inputs["query"]):
        kinds = {name: (torch.get_default_dtype(), device) for name, (_, device) in kinds.items()}
    if len(set(kinds.values())) > 1:
        descriptions = ", ".join(
            f"{name} {dtype} on {device}" for name, (dtype, device) in kinds.items()
        )
        raise ArgumentError(
            f"MultiHeadAttention: {descriptions}. Bring them to one dtype and device."
        )


def check_cache(cache: KVCache, window: WindowLike | None, reads_itself: bool) -> None:
    """Refuse a cache in cross-attention, or one whose kept keys do not match the window."""
    if not isinstance(cache, KVCache):
        raise ArgumentError(
            f"MultiHeadAttention: cache={cache!r} is not a KVCache. Give one, or None."
        )
    if not reads_itself:
        raise ArgumentError(
            "MultiHeadAttention: cache given together with key or value. "
            "A cache is for self-attention: give query alone."
        )
    n_before = window[0] if isinstance(window, tuple) else window
    if n_before is not None and cache.n_sinks:
        raise ArgumentError(
            f"MultiHeadAttention: window={window} hides the n_sinks={cache.n_sinks} first tokens "
            f"that the cache keeps. Make the layer without a window: the cache has one."
        )
    if n_before is not None and cache.window is not None and cache.window <= n_before:
        raise ArgumentError(
            f"MultiHeadAttention: window={window} sees {n_before} keys before the query's own, "
            f"but the cache keeps only window={cache.window}, the query's own included. "
            f"Give the cache window={n_before + 1}, or none."
        )
