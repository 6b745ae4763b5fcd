"""The attention function of models that run with a cache whose heads keep different tokens."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models.attention.huggingface import Call, rule_of
from headwise.models.cache._grouped_keys import GroupedKeys


def attend_cached(
    attend: Callable[..., Any],
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend to cached keys; all other calls go to the implementation of the model.

    Raises:
        ArgumentError: the cache belongs to another model.
        UnsupportedError: the module attends in both directions, or the call asks for weights,
            drops some, or adds a bias by position.
    """
    if not isinstance(key, GroupedKeys):
        return attend(module, query, key, value, attention_mask, *args, **kwargs)
    if id(module) not in key.call.modules:
        raise ArgumentError(
            f"CachePlan.cache: {type(module).__name__} belongs to another model than this cache. "
            f"Enter plan.cache(model) for the model that runs."
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(
            f"CachePlan.cache: {type(module).__name__} attends in both directions, as in an "
            f"encoder. Give a decoder."
        )
    plain = key.call.plain
    if plain is not None:
        return attend(module, query, *plain, attention_mask, *args, **kwargs)
    _check(module, Call.of(module, query, key, value, attention_mask, kwargs))
    rule = rule_of(module, implementation, query, key, attention_mask, kwargs)
    return key.call.attend(query, rule).transpose(1, 2), None


def _check(module: nn.Module, call: Call) -> None:
    """Refuse what cannot be computed for heads that keep different tokens."""
    name = type(module).__name__
    if call.needs_weights:
        raise UnsupportedError(
            f"CachePlan.cache: {name} should return weights, but its heads keep different tokens. "
            f"Leave output_attentions out; headwise.observe tells what each head sees."
        )
    if call.dropout:
        raise UnsupportedError(
            f"CachePlan.cache: {name} has dropout {call.dropout}. Call model.eval() before."
        )
    for argument in ("indices", "position_bias", "sinks"):
        if call.more.get(argument) is not None:
            raise UnsupportedError(
                f"CachePlan.cache: {name} gives {argument} to its attention, which cannot be read "
                f"for heads that keep different tokens. Use the cache of transformers."
            )
