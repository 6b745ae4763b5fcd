"""The sizes of an attention layer, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headwise.errors import ArgumentError, ShapeError

ROLES = "QKVO"
BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
)
"""Bytes of a number of each type."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one attention layer; `layer_sizes` makes it from the few that one knows.

    Counted are the projections, by role: Q, K, V, and O for `W_O`. What norms of queries and
    keys, gates, sinks or a table of biases add is not.

    Attributes:
        kdim: Width of what keys are made from. `vdim` is that of values.
        biases: The roles whose projections have a bias, such as "QKV".
        out_proj: Whether there is a `W_O`.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    kdim: int
    vdim: int
    biases: str
    out_proj: bool

    def widths(self) -> dict[str, tuple[int, int]]:
        """How wide what goes into each projection is, and what comes out of it."""
        out = {"O": (self.n_heads * self.v_head_dim, self.d_model)} if self.out_proj else {}
        return {
            "Q": (self.d_model, self.n_heads * self.head_dim),
            "K": (self.kdim, self.n_kv_heads * self.head_dim),
            "V": (self.vdim, self.n_kv_heads * self.v_head_dim),
            **out,
        }

    def weights(self) -> dict[str, int]:
        """The numbers in the matrix of each role: 4 · d_model² in all in the ordinary layer."""
        return {role: wide * out for role, (wide, out) in self.widths().items()}

    def bias_weights(self) -> dict[str, int]:
        """The numbers in the bias of each role, 0 where it has none."""
        return {role: out * (role in self.biases) for role, (_, out) in self.widths().items()}

    def parameters(self) -> dict[str, int]:
        """Matrix and bias of each role together."""
        biases = self.bias_weights()
        return {role: number + biases[role] for role, number in self.weights().items()}

    def multiply_adds(
        self, queries: int, keys: int | None = None, *, cached: int = 0
    ) -> dict[str, int]:
        """Multiplications, each with its addition, for one text; two FLOPs each.

        By role for the projections, then `logits` (queries times keys) and `mix` (weights times
        values). Every pair of query and key counts, whether a mask hides it or not: a kernel that
        skips what a causal mask hides does about half of `logits` and `mix`. Softmax, biases and
        scaling are left out: a few operations for each pair, beside 2 · head_dim.

        Args:
            keys: Keys in all, cached ones included. None is the queries themselves and what is
                cached: self-attention.
            cached: How many of the keys were made before, and are not projected again.
        Raises:
            ArgumentError: there is no query, or more keys are cached than there are.
        """
        keys = queries + cached if keys is None else keys
        if queries < 1 or not 0 <= cached <= keys:
            raise ArgumentError(
                f"multiply_adds: {queries} queries and {keys} keys, {cached} of them cached. "
                f"Give at least one query, and no more cached keys than keys."
            )
        rows = {"Q": queries, "K": keys - cached, "V": keys - cached, "O": queries}
        work = {role: rows[role] * number for role, number in self.weights().items()}
        pairs = self.n_heads * queries * keys
        return work | {"logits": pairs * self.head_dim, "mix": pairs * self.v_head_dim}

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes that the key and the value of one token take, in all kv heads.

        Raises:
            ArgumentError: the type is none of `BYTES`.
        """
        if dtype not in BYTES:
            raise ArgumentError(
                f"cache_bytes: the type {dtype!r} is not known. Give {', '.join(BYTES)}."
            )
        return self.n_kv_heads * (self.head_dim + self.v_head_dim) * BYTES[dtype]


def layer_sizes(
    d_model: int,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    kdim: int | None = None,
    vdim: int | None = None,
    biases: str = "",
    out_proj: bool = True,
) -> LayerSizes:
    """Complete the sizes of a layer as `MultiHeadAttention` does.

    Args:
        n_kv_heads: None is `n_heads`.
        head_dim: Width of a query and of a key. None is `d_model / n_heads`.
        v_head_dim: Width of a value. None is `head_dim`.
        kdim: Width of what keys are made from. None is `d_model`.
        vdim: Width of what values are made from. None is `kdim`.
        biases: The roles with a bias, out of "QKVO".
        out_proj: Whether there is a `W_O`.
    Raises:
        ArgumentError: a size is not positive, or `biases` names something else than roles.
        ShapeError: `d_model` is not a multiple of `n_heads` and no `head_dim` is given, or
            `n_heads` is not a multiple of `n_kv_heads`.
    """
    if n_heads < 1 or set(biases) - set(ROLES):
        raise ArgumentError(
            f"layer_sizes: n_heads={n_heads}, biases={biases!r}. "
            f"Give a positive number of heads, and biases for some of {ROLES}."
        )
    if head_dim is None and d_model % n_heads:
        raise ShapeError(
            f"layer_sizes: d_model={d_model} cannot be shared by n_heads={n_heads} evenly. "
            f"Make it a multiple, or give head_dim."
        )
    width = d_model // n_heads if head_dim is None else head_dim
    into_keys = d_model if kdim is None else kdim
    sizes = {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads,
        "head_dim": width,
        "v_head_dim": width if v_head_dim is None else v_head_dim,
        "kdim": into_keys,
        "vdim": into_keys if vdim is None else vdim,
    }
    _check(sizes)
    return LayerSizes(**sizes, biases=biases, out_proj=out_proj)


def _check(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"layer_sizes: {name}={size}. Give a positive number.")
    n_heads, n_kv_heads = sizes["n_heads"], sizes["n_kv_heads"]
    if n_heads % n_kv_heads:
        raise ShapeError(
            f"layer_sizes: n_heads={n_heads} cannot share n_kv_heads={n_kv_heads} evenly. "
            f"Make n_heads a multiple of n_kv_heads."
        )
