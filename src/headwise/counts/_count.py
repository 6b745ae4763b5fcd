"""All that is counted of a model, as plain data."""

from dataclasses import asdict
from typing import Any

from headwise.counts._model import ModelSizes


def count(
    model: ModelSizes,
    queries: int,
    keys: int | None = None,
    *,
    cached: int = 0,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Count parameters, work and cache of a model's attention, for one layer and for all.

    Args:
        queries: Tokens that are computed.
        keys: Keys in all, cached ones included. None is `queries + cached`: self-attention.
        cached: How many of the keys are in a cache already.
        dtype: What keys and values are kept in.
    Returns:
        What can be written as JSON. `multiply_adds` are for the text, two FLOPs each.
        `cache_bytes` of the layer and the model are for each token, those of the text for all
        its keys. `share` is that of the whole model's parameters, from 0 to 1, None where their
        number is not known.
    Raises:
        ArgumentError: there is no query, more keys are cached than there are, or the type is
            not known.
    """
    layer, n_layers = model.layer, model.n_layers
    weights, biases = layer.weights(), layer.bias_weights()
    keys = queries + cached if keys is None else keys
    kept = keys * model.cache_bytes(dtype)
    work = layer.multiply_adds(queries, keys, cached=cached)
    return {
        "name": model.name,
        "source": model.source,
        "sizes": asdict(layer),
        "text": {"queries": queries, "keys": keys, "cached": cached, "cache_bytes": kept},
        "layer": {
            "weights": weights,
            "biases": biases,
            "parameters": sum(layer.parameters().values()),
            "multiply_adds": work,
            "cache_bytes": layer.cache_bytes(dtype),
        },
        "model": {
            "layers": n_layers,
            "weights": n_layers * sum(weights.values()),
            "biases": n_layers * sum(biases.values()),
            "parameters": model.parameters(),
            "multiply_adds": n_layers * sum(work.values()),
            "flops": 2 * n_layers * sum(work.values()),
            "cache_bytes": model.cache_bytes(dtype),
            "cache_dtype": dtype,
            "all_parameters": model.all_parameters,
            "share": model.share(),
        },
    }
