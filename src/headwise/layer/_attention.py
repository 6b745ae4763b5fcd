"""Multi-head attention as a module whose parts are real sub-modules that are called."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.kernels import Bias, Given, MaskLike, WindowLike
from headwise.layer._biases import Placed, PositionBias
from headwise.layer._cache import Held, KVCache
from headwise.layer._check import check_cache, check_inputs, check_parts, read_bias, read_sizes
from headwise.layer._convert import ConvertibleLayer
from headwise.layer._core import HeadAttention, HeadNorm, LayerOutput, LayerOutputWithLse
from headwise.layer._positions import RoPE
from headwise.masks import Mask, as_mask, split_additive


class MultiHeadAttention(ConvertibleLayer):
    """Attention in several heads, for self- and cross-attention.

    Each head has its own queries; `n_kv_heads` of keys and values are shared by groups of
    heads (1 is multi-query attention). Query head `h` reads kv head `h // (n_heads //
    n_kv_heads)`. The projections are ordinary `nn.Linear` modules and are called as modules,
    so adapters, quantisation and hooks work on them.

    Queries stand at the end of the keys, as in `headwise.masks`; positions are counted that way.

    Args:
        d_model: Width of what comes in as queries and of what goes out.
        n_heads: Number of query heads.
        n_kv_heads: Number of key/value heads. None is `n_heads`.
        head_dim: Width of a query or key. None is `d_model / n_heads`.
        v_head_dim: Width of a value. None is `head_dim`.
        bias: Whether the projections have biases; "qkv": only those of queries, keys and
            values, as in Qwen2.
        dropout: Share of weights dropped in training.
        kdim: Width of what keys are made from. None is `d_model`.
        vdim: Width of what values are made from. None is `kdim`.
        qk_norm: Whether each query and key is divided by its root mean square, and scaled by
            learned factors, before it is turned.
        gate: Whether each head's output is multiplied by a share that its query decides.
        out_proj: Whether heads are mixed on the way out. Without it they stand side by side,
            and none reaches another's features.
        rope: Turns queries and keys by their positions.
        position_bias: Is added to the logits: `ALiBi`, `T5Bias`, or a part of your own.
        scale: What `q · k` is multiplied by. None is `1 / sqrt(head_dim)`.
        softcap: Logits become `softcap · tanh(logits / softcap)`.
        window: How many keys are visible on each side of a query besides its own, `(left, right)`.
            A cache's `window=n` counts the query's own too, and may not be the shorter one.
        sinks: A further logit for each head, in the denominator alone. An `nn.Parameter` is
            learned; a tensor or one number for all heads stays constant.
    Raises:
        ShapeError: `d_model` is not a multiple of `n_heads` and no `head_dim` is given,
            `n_heads` is not a multiple of `n_kv_heads`, or a part was made for other sizes.
        ArgumentError: a size is not positive, or a value is out of range.
    Source:
        Vaswani et al. 2017, §3.2.2 (arXiv:1706.03762); grouped heads: Ainslie et al. 2023
        (arXiv:2305.13245); normed queries and keys: Henry et al. 2020 (arXiv:2010.04245);
        gate: Qiu et al. 2025, head-wise after attention (arXiv:2505.06708).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        bias: bool | Literal["qkv"] = False,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
        qk_norm: bool = False,
        gate: bool = False,
        out_proj: bool = True,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        window: WindowLike | None = None,
        sinks: Float[Tensor, " H"] | float | None = None,
    ) -> None:
        super().__init__()
        sizes = read_sizes(d_model, n_heads, n_kv_heads, head_dim, v_head_dim, kdim, vdim)
        self.d_model, self.n_heads, self.n_kv_heads, *widths = sizes
        self.head_dim, self.v_head_dim, self.kdim, self.vdim = widths
        check_parts(sizes, rope, position_bias, sinks)
        inner, outer = read_bias(bias)
        self.rope, self.position_bias = rope, position_bias
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=inner)
        self.k_proj = nn.Linear(self.kdim, self.n_kv_heads * self.head_dim, bias=inner)
        self.v_proj = nn.Linear(self.vdim, self.n_kv_heads * self.v_head_dim, bias=inner)
        self.q_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.attention = HeadAttention(
            dropout, scale=scale, softcap=softcap, window=window, sinks=sinks
        )
        self.gate_proj = nn.Linear(d_model, n_heads, bias=outer) if gate else None
        joined = n_heads * self.v_head_dim
        self.out_proj = nn.Linear(joined, d_model, bias=outer) if out_proj else nn.Identity()

    def forward(
        self,
        query: Float[Tensor, "B T d_model"],
        key: Float[Tensor, "B S kdim"] | None = None,
        value: Float[Tensor, "B S vdim"] | None = None,
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        need_weights: bool = False,
        need_lse: bool = False,
    ) -> Float[Tensor, "B T d_out"] | LayerOutput | LayerOutputWithLse:
        """Attend from `query` to `key` and mix `value`.

        Args:
            key: What is attended to. None is `query` itself: self-attention.
            value: What is mixed. None is `key`.
            mask: As in `headwise.attend`: True = may attend. With a cache its keys are the
                slots in use, this call's included.
            causal: Whether a query sees only its own position and earlier ones.
            cache: What was read so far; keys and values of `query` are added to it.
            need_weights: Whether to return the weights of every head too.
            need_lse: Whether to return the log of the sum of the exponentials of every head too.
        Returns:
            The output, and with `need_weights` the weights, before dropout. With `need_lse` there
            are three: output, weights (None where not asked for) and log-sum-exps. Which kernel
            was taken, and why, is `choice` of what `attention` then gives: a hook on it sees that.
        Raises:
            ShapeError: a width is not the one the layer was made for, or the cache is full.
            ArgumentError: dtypes or devices differ, a cache is given in cross-attention, it keeps
                sinks that the layer's own window hides, or forgets keys within that window.
        """
        if cache is not None:
            check_cache(cache, self.attention.window, reads_itself=key is None and value is None)
        key = query if key is None else key
        value = key if value is None else value
        widths = self.d_model, self.kdim, self.vdim
        check_inputs({"query": query, "key": key, "value": value}, widths, self.q_proj)
        q = self.q_norm(self._split(self.q_proj(query), self.head_dim))
        k = self.k_norm(self._split(self.k_proj(key), self.head_dim))
        v = self._split(self.v_proj(value), self.v_head_dim)
        placed = self._place(q, k, v, mask, cache)
        found = self.attention(
            placed.q, placed.k, placed.v,
            mask=placed.mask, bias=placed.bias, causal=causal,
            need_weights=need_weights, need_lse=need_lse,
        )  # fmt: skip
        extras = need_weights or need_lse
        out = self._join(found.heads if extras else found, query)
        if cache is not None and placed.held is not None:
            cache.keep(placed.held)  # last, so that a call that fails adds nothing
        if not extras:
            return out
        if need_lse:
            return LayerOutputWithLse(out, found.weights, found.lse)
        return LayerOutput(out, found.weights)

    def _place(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike | None, cache: KVCache | None
    ) -> "_Placed":
        """Queries and keys where they stand: turned, joined by what was read before, biased."""
        if cache is None and self.rope is None and self.position_bias is None:
            return _Placed(q, k, v, mask, None, None)
        if cache is not None:
            cache.check(k, v)
        query_at, key_at = _positions(q, k, cache)
        if self.rope is not None:
            turns = self.rope.turns(query_at, q.dtype)
            q = self.rope.turn(q, turns)
            k = self.rope.turn(k, turns if key_at is query_at else self.rope.turns(key_at, k.dtype))
        bias: Bias | None = None
        held: Held | None = None
        if cache is not None:
            held = cache.join(k, v)
            k, v, key_at = held
            mask, bias = _both(mask, cache.visible(held, query_at))
        if self.position_bias is not None:
            in_steps = cache is None or cache.window is None
            own = Placed(self.position_bias, query_at, key_at, q.dtype, in_steps)
            bias = own if bias is None else own + bias
        return _Placed(q, k, v, mask, bias, held)

    def _split(self, x: Tensor, width: int) -> Tensor:
        # Heads are counted from what is there: under tensor parallelism it is a part of them.
        return x.reshape(*x.shape[:2], x.shape[-1] // width, width).transpose(1, 2)  # B H T D

    def _join(self, heads: Tensor, query: Tensor) -> Tensor:
        heads = heads.transpose(1, 2)  # B T H Dv
        if self.gate_proj is not None:
            heads = heads * self.gate_proj(query).sigmoid().unsqueeze(-1)
        return self.out_proj(heads.flatten(2))

    def extra_repr(self) -> str:
        told = ("d_model", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "rope")
        return ", ".join(f"{name}={getattr(self, name)}" for name in told)


class _Placed(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskLike | None
    bias: Bias | None
    held: Held | None  # what a cache hands out; to be kept when all went well


def _positions(q: Tensor, k: Tensor, cache: KVCache | None) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand: the last query with the last key."""
    T, S = q.shape[2], k.shape[2]
    if cache is not None:
        key_at = cache.positions(S, k.device)
    else:
        key_at = torch.arange(S, device=k.device)[None]
    return (key_at if T == S else torch.arange(S - T, S, device=k.device)[None]), key_at


def _both(mask: MaskLike | None, visible: Mask | None) -> tuple[MaskLike | None, Bias | None]:
    """A mask for what both allow, and what is left to add to the logits."""
    if visible is None or mask is None:
        return (visible if mask is None else mask), None
    if isinstance(mask, Mask):
        return mask & visible, None
    if mask.dtype == torch.bool:
        return as_mask(mask) & visible, None
    seen, bias = split_additive(mask, "MultiHeadAttention")
    return visible if seen is None else seen & visible, None if bias is None else Given(bias)
