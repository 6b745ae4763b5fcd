"""Multi-head attention as a module whose parts are real sub-modules that are called."""

from typing import NamedTuple, cast

from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, ShapeError
from headwise.kernels import AttendOutput, MaskLike, attend


class LayerOutput(NamedTuple):
    """What the layer gives when weights are asked for."""

    out: Float[Tensor, "B T d_model"]
    weights: Float[Tensor, "B H T S"]  # per head, never averaged


class HeadAttention(nn.Module):
    """`attend` as a module without parameters, so that a hook can watch queries, keys and heads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hkv S D"],
        v: Float[Tensor, "B Hkv S Dv"],
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        need_weights: bool = False,
    ) -> Float[Tensor, "B H T Dv"] | AttendOutput:
        return attend(
            q, k, v,
            mask=mask,
            causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


class MultiHeadAttention(nn.Module):
    """Attention in several heads, for self- and cross-attention.

    Each head has its own queries; `n_kv_heads` of keys and values are shared by groups of
    heads (1 is multi-query attention). Query head `h` reads kv head `h // (n_heads //
    n_kv_heads)`. The projections are ordinary `nn.Linear` modules and are called as modules,
    so adapters, quantisation and hooks work on them.

    Args:
        d_model: Width of what comes in as queries and of what goes out.
        n_heads: Number of query heads.
        n_kv_heads: Number of key/value heads. None is `n_heads`.
        head_dim: Width of one head. None is `d_model / n_heads`.
        bias: Whether the projections have biases.
        dropout: Share of weights dropped in training.
        kdim: Width of what keys are made from. None is `d_model`.
        vdim: Width of what values are made from. None is `kdim`.
    Raises:
        ShapeError: `d_model` is not a multiple of `n_heads` and no `head_dim` is given, or
            `n_heads` is not a multiple of `n_kv_heads`.
        ArgumentError: a size is not positive, or `dropout` is not a share.
    Source:
        Vaswani et al. 2017, §3.2.2 (arXiv:1706.03762); grouped heads: Ainslie et al. 2023
        (arXiv:2305.13245).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.kdim = d_model if kdim is None else kdim
        self.vdim = self.kdim if vdim is None else vdim
        self._check_sizes(head_dim, dropout)
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.kdim, self.n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(self.vdim, self.n_kv_heads * self.head_dim, bias=bias)
        self.attention = HeadAttention(dropout)
        self.out_proj = nn.Linear(n_heads * self.head_dim, d_model, bias=bias)

    def forward(
        self,
        query: Float[Tensor, "B T d_model"],
        key: Float[Tensor, "B S kdim"] | None = None,
        value: Float[Tensor, "B S vdim"] | None = None,
        *,
        mask: MaskLike | None = None,
        causal: bool = False,
        need_weights: bool = False,
    ) -> Float[Tensor, "B T d_model"] | LayerOutput:
        """Attend from `query` to `key` and mix `value`.

        Args:
            key: What is attended to. None is `query` itself: self-attention.
            value: What is mixed. None is `key`.
            mask: As in `headwise.attend`: True = may attend.
            causal: Whether a query sees only its own position and earlier ones.
            need_weights: Whether to return the weights of every head too.
        Returns:
            The output, and with `need_weights` the weights, before dropout.
        Raises:
            ShapeError: a width is not the one the layer was made for.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        q = self._split(self.q_proj(query), self.n_heads)
        k = self._split(self.k_proj(key), self.n_kv_heads)
        v = self._split(self.v_proj(value), self.n_kv_heads)
        attended = self.attention(q, k, v, mask=mask, causal=causal, need_weights=need_weights)
        if not need_weights:
            return self._join(attended)
        return LayerOutput(self._join(attended.heads), cast(Tensor, attended.weights))

    def _split(self, x: Tensor, n_heads: int) -> Tensor:
        return x.reshape(*x.shape[:2], n_heads, self.head_dim).transpose(1, 2)  # B H T D

    def _join(self, heads: Tensor) -> Tensor:
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # B T H*D

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x, width in (
            ("query", query, self.d_model), ("key", key, self.kdim), ("value", value, self.vdim),
        ):  # fmt: skip
            if x.ndim != 3 or x.shape[-1] != width:
                raise ShapeError(
                    f"MultiHeadAttention: {name} {tuple(x.shape)}. "
                    f"Give [batch, tokens, {width}]; the layer was made for that width."
                )

    def _check_sizes(self, head_dim: int | None, dropout: float) -> None:
        sizes = {n: getattr(self, n) for n in ("d_model", "n_heads", "n_kv_heads", "kdim", "vdim")}
        for name, size in (sizes | {"head_dim": 1 if head_dim is None else head_dim}).items():
            if size < 1:
                raise ArgumentError(f"MultiHeadAttention: {name}={size}. Give a positive number.")
        if head_dim is None and self.d_model % self.n_heads:
            raise ShapeError(
                f"MultiHeadAttention: d_model={self.d_model} cannot be shared by "
                f"n_heads={self.n_heads} evenly. Make it a multiple, or give head_dim."
            )
        if self.n_heads % self.n_kv_heads:
            raise ShapeError(
                f"MultiHeadAttention: n_heads={self.n_heads} cannot share "
                f"n_kv_heads={self.n_kv_heads} evenly. Make n_heads a multiple of n_kv_heads."
            )
        if not 0.0 <= dropout < 1.0:
            raise ArgumentError(
                f"MultiHeadAttention: dropout={dropout}. Give a share from 0 up to 1."
            )

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, "
            f"n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
        )
