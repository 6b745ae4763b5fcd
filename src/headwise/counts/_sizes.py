"""The attention sizes of a layer and of a model, and the counts that follow from them.

`headwise.surgery.costs` counts the same of each head of a model that is there, by its weights.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from headwise.errors import ArgumentError, ShapeError

ROLES = "QKVO"
BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
)
"""Bytes of one number of each dtype."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one attention layer; `layer_sizes` derives those that are not given.

    Its counts cover the projections, by role: Q, K, V, and O for `W_O`. They leave out norms of
    queries and keys, gates, sinks and tables of biases.

    Attributes:
        head_dim: The width of a query, a key and a value.
        biases: The roles whose projections have a bias, such as "QKV".
        out_proj: Whether there is a `W_O`.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    biases: str
    out_proj: bool

    def weights(self) -> dict[str, int]:
        """The weights of each projection's matrix: 4 · d_model² in all in an ordinary layer."""
        queries, keys = (n * self.head_dim * self.d_model for n in (self.n_heads, self.n_kv_heads))
        return {"Q": queries, "K": keys, "V": keys} | ({"O": queries} if self.out_proj else {})

    def bias_weights(self) -> dict[str, int]:
        """The size of each projection's bias, 0 where it has none."""
        keys = self.n_kv_heads * self.head_dim
        sizes = {"Q": self.n_heads * self.head_dim, "K": keys, "V": keys, "O": self.d_model}
        return {role: sizes[role] * (role in self.biases) for role in self.weights()}

    def parameters(self) -> dict[str, int]:
        """The parameters of each projection: its matrix and its bias."""
        biases = self.bias_weights()
        return {role: number + biases[role] for role, number in self.weights().items()}

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
        products = self.n_heads * queries * keys * self.head_dim
        return projections | {"logits": products, "mix": products}

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """The bytes of one token's keys and values, in all key/value heads.

        Raises:
            ArgumentError: the dtype is not one of `BYTES`.
        """
        if dtype not in BYTES:
            raise ArgumentError(
                f"cache_bytes: the dtype {dtype!r} is unknown. Give {', '.join(BYTES)}."
            )
        return self.n_kv_heads * 2 * self.head_dim * BYTES[dtype]


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a stack of equal attention layers.

    Attributes:
        all_parameters: The parameters of the whole model; None where they are unknown.
        source: The paper or file that the sizes come from.
        has_cache: Whether keys and values are kept for later tokens; an encoder keeps none.
    """

    name: str
    layer: LayerSizes
    n_layers: int
    all_parameters: int | None = None
    source: str = ""
    has_cache: bool = True

    def parameters(self) -> int:
        """The parameters of all attention layers together."""
        return self.n_layers * sum(self.layer.parameters().values())

    def share(self) -> float | None:
        """The attention's share of the model's parameters, from 0 to 1; None if it is unknown."""
        return None if self.all_parameters is None else self.parameters() / self.all_parameters

    def cache_bytes(self, dtype: str = "bfloat16") -> int:
        """The bytes of the keys and values of one token in all layers; 0 without a cache."""
        return self.n_layers * self.layer.cache_bytes(dtype) if self.has_cache else 0


def layer_sizes(
    d_model: int,
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    head_dim: int | None = None,
    biases: str = "",
    out_proj: bool = True,
) -> LayerSizes:
    """Derive all sizes of a layer from the given ones, as `MultiHeadAttention` does.

    Args:
        n_kv_heads: None is `n_heads`.
        head_dim: The width of one head. None is `d_model / n_heads`.
        biases: The roles with a bias, out of "QKVO".
        out_proj: Whether there is a `W_O`.
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


def count(
    model: ModelSizes,
    queries: int,
    keys: int | None = None,
    *,
    cached: int = 0,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Count parameters, multiply-adds and cache of a model's attention, per layer and in all.

    Args:
        queries: The number of query tokens.
        keys: The number of keys, cached ones included. None is `queries + cached`:
            self-attention.
        cached: The number of keys that are already in a cache.
        dtype: The dtype of cached keys and values.
    Returns:
        Plain data for JSON. `multiply_adds` are for the text, two FLOPs each. `cache_bytes` of
        the layer and the model are per token, those of the text for all its keys, all 0 for an
        encoder. `share` is the attention's share of the whole model's parameters, from 0 to 1,
        None where their number is unknown.
    Raises:
        ArgumentError: there is no query, more keys are cached than there are, or the dtype is
            unknown.
    """
    layer, n_layers = model.layer, model.n_layers
    weights, biases = layer.weights(), layer.bias_weights()
    keys = queries + cached if keys is None else keys
    multiply_adds = layer.multiply_adds(queries, keys, cached=cached)
    bytes_per_token = model.cache_bytes(dtype)
    return {
        "name": model.name,
        "source": model.source,
        "sizes": asdict(layer),
        "text": {"queries": queries, "keys": keys, "cached": cached}
        | {"cache_bytes": keys * bytes_per_token},
        "layer": {
            "weights": weights,
            "biases": biases,
            "parameters": sum(layer.parameters().values()),
            "multiply_adds": multiply_adds,
            "cache_bytes": bytes_per_token // n_layers,
        },
        "model": {
            "layers": n_layers,
            "weights": n_layers * sum(weights.values()),
            "biases": n_layers * sum(biases.values()),
            "parameters": model.parameters(),
            "multiply_adds": n_layers * sum(multiply_adds.values()),
            "flops": 2 * n_layers * sum(multiply_adds.values()),
            "cache_bytes": bytes_per_token,
            "cache_dtype": dtype,
            "all_parameters": model.all_parameters,
            "share": model.share(),
        },
    }


_BERT = "Devlin et al. 2019, section 3 (arXiv:1810.04805)"
_GPT2 = "Radford et al. 2019, table 2; heads as in the released models"
_GPT3 = "Brown et al. 2020, table 2.1 (arXiv:2005.14165)"
_LLAMA = "Touvron et al. 2023, table 2 (arXiv:2302.13971)"
_LLAMA_2 = "Touvron et al. 2023, table 1 (arXiv:2307.09288); widths as in the released model"
_MISTRAL = "Jiang et al. 2023, table 1 (arXiv:2310.06825)"

# Biases; d_model, heads, kv heads; layers, all parameters (each counted once), source.
_PRESETS = {
    "bert-base": ("QKVO", (768, 12, 12), (12, 109_482_240, _BERT)),
    "bert-large": ("QKVO", (1024, 16, 16), (24, 335_141_888, _BERT)),
    "gpt2": ("QKVO", (768, 12, 12), (12, 124_439_808, _GPT2)),
    "gpt2-medium": ("QKVO", (1024, 16, 16), (24, 354_823_168, _GPT2)),
    "gpt2-large": ("QKVO", (1280, 20, 20), (36, 774_030_080, _GPT2)),
    "gpt2-xl": ("QKVO", (1600, 25, 25), (48, 1_557_611_200, _GPT2)),
    "gpt3-175b": ("QKVO", (12288, 96, 96), (96, 174_604_259_328, _GPT3)),
    "llama-7b": ("", (4096, 32, 32), (32, 6_738_415_616, _LLAMA)),
    "llama-2-70b": ("", (8192, 64, 8), (80, 68_976_648_192, _LLAMA_2)),
    "mistral-7b": ("", (4096, 32, 8), (32, 7_241_732_096, _MISTRAL)),
}
PRESETS: Mapping[str, ModelSizes] = MappingProxyType(
    {
        name: ModelSizes(name, layer_sizes(*sizes, biases=biases), *facts, "bert" not in name)
        for name, (biases, sizes, facts) in _PRESETS.items()
    }
)
"""Well-known models by name."""
