"""Everything that is counted of a model, as plain data."""

from dataclasses import asdict
from typing import Any

from headwise.counts._sizes import ModelSizes


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
        encoder. `share` is
        the attention's share of the whole model's parameters, from 0 to 1, None where their
        number is unknown.
    Raises:
        ArgumentError: there is no query, more keys are cached than there are, or the dtype is
            unknown.
    """
    layer, n_layers = model.layer, model.n_layers
    weights, biases = layer.weights(), layer.bias_weights()
    keys = queries + cached if keys is None else keys
    text = {"queries": queries, "keys": keys, "cached": cached}
    multiply_adds = layer.multiply_adds(queries, keys, cached=cached)
    return {
        "name": model.name,
        "source": model.source,
        "sizes": asdict(layer),
        "text": text | {"cache_bytes": keys * model.cache_bytes(dtype)},
        "layer": {
            "weights": weights,
            "biases": biases,
            "parameters": sum(layer.parameters().values()),
            "multiply_adds": multiply_adds,
            "cache_bytes": model.cache_bytes(dtype) // n_layers,
        },
        "model": {
            "layers": n_layers,
            "weights": n_layers * sum(weights.values()),
            "biases": n_layers * sum(biases.values()),
            "parameters": model.parameters(),
            "multiply_adds": n_layers * sum(multiply_adds.values()),
            "flops": 2 * n_layers * sum(multiply_adds.values()),
            "cache_bytes": model.cache_bytes(dtype),
            "cache_dtype": dtype,
            "all_parameters": model.all_parameters,
            "share": model.share(),
        },
    }
