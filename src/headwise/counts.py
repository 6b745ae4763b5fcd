"""Parameters, multiply-adds and cache bytes of attention layers, from their sizes alone.

`headwise.costs` counts the same of each head of a model that is there, by its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headwise.errors import ArgumentError, ShapeError

__all__ = ["BYTES", "LayerSizes", "layer_sizes"]

ROLES = "QKVO"
BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
)
"""Bytes of one number of each dtype."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of equal attention layers; `layer_sizes` derives those that are not given.

    Counts are of all layers together. They cover the projections, by role: Q, K, V, and O for
    `W_O`. They leave out norms of queries and keys, gates, sinks and tables of biases.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    biases: str
    out_proj: bool
    n_layers: int

    def weights(self) -> dict[str, int]:
        """The weights of each projection's matrix: 4 · d_model² in all in an ordinary layer."""
        of_head = self.n_layers * self.head_dim * self.d_model
        keys = self.n_kv_heads * of_head
        weights = {"Q": self.n_heads * of_head, "K": keys, "V": keys, "O": self.n_heads * of_head}
        return {role: weights[role] for role in ROLES if role != "O" or self.out_proj}

    def parameters(self) -> dict[str, int]:
        """The parameters of each projection: its matrix and its bias, if it has one."""
        keys = self.n_kv_heads * self.head_dim
        widths = {"Q": self.n_heads * self.head_dim, "K": keys, "V": keys, "O": self.d_model}
        return {
            role: number + self.n_layers * widths[role] * (role in self.biases)
            for role, number in self.weights().items()
        }

    def multiply_adds(
        self, queries: int, keys: int | None = None, *, cached: int = 0
    ) -> dict[str, int]:
        """Count multiply-adds for one text; each is two FLOPs.

        The projections are counted by role, then `logits` (queries times keys) and `mix` (weights
        times values). Every query-key pair counts, masked or not: a kernel that skips the keys
        hidden by a causal mask does about half of `logits` and `mix`. Softmax, biases and scaling
        are left out: a few operations per pair, compared with 2 · head_dim.

        Args:
            keys: The number of keys, cached ones included. None is `queries + cached`:
                self-attention.
            cached: The number of keys that are already in a cache, so not projected again.
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
        projections = {role: rows[role] * number for role, number in self.weights().items()}
        products = self.n_layers * self.n_heads * queries * keys * self.head_dim
        return projections | {"logits": products, "mix": products}

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """The bytes of one token's keys and values, in all kv heads of all layers.

        Raises:
            ArgumentError: the dtype is not one of `BYTES`.
        """
        if dtype not in BYTES:
            raise ArgumentError(
                f"cache_bytes: the dtype {dtype!r} is unknown. Give {', '.join(BYTES)}."
            )
        return self.n_layers * self.n_kv_heads * 2 * self.head_dim * BYTES[dtype]


def layer_sizes(
    d_model: int,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    head_dim: int | None = None,
    biases: str = "",
    out_proj: bool = True,
    n_layers: int = 1,
) -> LayerSizes:
    """Derive all sizes of a layer from the given ones, as `MultiHeadAttention` does.

    Args:
        n_kv_heads: None is `n_heads`.
        head_dim: The width of one query, key and value. None is `d_model / n_heads`.
        biases: The roles whose projections have a bias, out of "QKVO".
        out_proj: Whether there is a `W_O`.
        n_layers: The layers of this kind in a model.
    Raises:
        ArgumentError: a size is not positive, or `biases` has a letter that is no role.
        ShapeError: `d_model` is not a multiple of `n_heads` and no `head_dim` is given, or
            `n_heads` is not a multiple of `n_kv_heads`.
    """
    if n_heads < 1 or set(biases) - set(ROLES):
        raise ArgumentError(
            f"layer_sizes: n_heads={n_heads}, biases={biases!r}. "
            f"Give a positive number of heads, and biases out of {ROLES}."
        )
    if head_dim is None and d_model % n_heads:
        raise ShapeError(
            f"layer_sizes: d_model={d_model} is not a multiple of n_heads={n_heads}. "
            f"Give a multiple, or head_dim."
        )
    sizes = {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads,
        "head_dim": d_model // n_heads if head_dim is None else head_dim,
        "n_layers": n_layers,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"layer_sizes: {name}={size}. Give a positive number.")
    if n_heads % sizes["n_kv_heads"]:
        raise ShapeError(
            f"layer_sizes: n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}. "
            f"Give a multiple."
        )
    return LayerSizes(**sizes, biases=biases, out_proj=out_proj)
