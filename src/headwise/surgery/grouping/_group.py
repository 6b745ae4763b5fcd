"""Let the heads of a model share keys and values: grouped or multi-query attention."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import (
    Attention,
    around,
    batches_of,
    check_model,
    compose_heads,
    example_input,
    find_attentions,
    find_ownership,
    float_outputs,
    output_difference,
    set_original_heads,
)
from headwise.surgery._prune import refuse_packed
from headwise.surgery.grouping._config import KvHeads
from headwise.surgery.grouping._covariance import input_roots
from headwise.surgery.grouping._layer import Grouped, GroupedLayer, Source
from headwise.surgery.grouping._rows import Layout, Trace, layout_of, traced
from headwise.surgery.grouping._symmetries import (
    Symmetries,
    none_free,
    symmetries_of_keys,
    symmetries_of_values,
)

Method = Literal["fit", "mean"]


def group_heads(
    model: nn.Module,
    n_kv_heads: int,
    *,
    method: Method = "fit",
    reference: Iterable[Any] | None = None,
    on_layer: Callable[[GroupedLayer], None] | None = None,
) -> nn.Module:
    """Let the heads of a copy of a model share keys and values: fewer kv heads, a smaller cache.

    Kv heads that are alike come together in groups of equal size, wherever they stood, and their
    query heads are put in that order. Of all keys and values that a group can share, those are
    taken that lose least in the logits and in the output; what a head needs to read them is
    taken on by its queries and output weights and costs nothing. That is exact where heads
    differ only by it: values may be mixed in any way; features of keys that no position turns
    too; those that RoPE turns may be turned and scaled in the same pairs; what a norm follows
    cannot be mixed and is averaged. Which features these are is read from the model as it runs,
    and needs no list of architectures.

    Otherwise the model loses something: train it further, which takes about a twentieth of the
    first training (Ainslie et al. 2023). What it gives is checked to be what `model` would give
    with each head's keys and values replaced by its share of the group's. Its configuration
    tells the new number, so that `save_pretrained` writes what stock transformers loads.

    Args:
        model: A model of Hugging Face whose configuration has `num_key_value_heads`, or a
            `SentenceTransformer` around one. It stays as it is.
        n_kv_heads: How many each layer shall have: a divisor of how many it has.
        method: "fit", or "mean": the plain mean of neighbors, nothing mixed.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or the only
            one: what heads give on these is to be kept. None keeps what they give whatever
            comes in. Of no use to "mean".
        on_layer: Is told of each layer what came together, what was mixed and what is lost.
    Returns:
        The grouped model, in the mode of the model.
    Raises:
        ArgumentError: the number does not divide how many there are or is none below it, the
            method is unknown, or a reference is empty or given for "mean".
        UnsupportedError: the configuration knows no kv heads, heads were cut out before, keys
            or values are no rows of a linear layer, positions are bound to heads, or weights are
            quantised, under adapters or spread over devices.
    Source:
        Means: Ainslie et al. 2023 (arXiv:2305.13245); leading directions: Yu et al. 2024
        (arXiv:2406.07056); the same up to what is absorbed: Jin et al. 2024 (arXiv:2412.20677).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, intermediate_size=16, **sizes))
        >>> small = group_heads(model, 2)
        >>> small.config.num_key_value_heads, small.model.layers[0].self_attn.k_proj.out_features
        (2, 8)
    """
    outer, model = model, check_model("group_heads", model)
    refuse_packed(model, "group_heads")
    now = KvHeads.of(model)
    batches = _checked(now, n_kv_heads, method, reference)
    batch = batches[0] if batches else example_input(model)
    sources = _sources(model, now, batch)
    roots = input_roots(model, {one.attention: one.layout for one in sources}, batches)
    small = deepcopy(model)
    grouped = []
    for source in sources:
        if method == "mean":
            one = Grouped.pooled(model, source, n_kv_heads)
        else:
            one = Grouped.fitted(model, source, n_kv_heads, roots)
        one.expand(model, small)
        grouped.append(one)
        if on_layer is not None:
            on_layer(one.told())
    wanted = float_outputs(small, batch)
    now.change(small, n_kv_heads)
    for one, layout in zip(grouped, _layouts(small, n_kv_heads, batch), strict=True):
        one.settle(model, small, layout)
    _prove(small, batch, wanted)
    orders = {one.source.attention.module: one.order for one in grouped}
    layers = {(a.site.stack, a.site.layer): orders[a.module] for a in find_attentions(model, batch)}
    set_original_heads(small, compose_heads(model, layers))
    return small if outer is model else around(outer, small)


def _checked(
    now: KvHeads, n_kv_heads: int, method: str, reference: Iterable[Any] | None
) -> list[Any]:
    if method not in ("fit", "mean"):
        raise ArgumentError(f"group_heads: method={method!r}. Choose 'fit' or 'mean'.")
    batches = batches_of(reference, "group_heads")
    if reference is not None and (method == "mean" or not batches):
        raise ArgumentError(
            f"group_heads: reference holds {len(batches)} batches for method={method!r}. Give some "
            f"for 'fit', and none for 'mean'."
        )
    if type(n_kv_heads) is not int or not 0 < n_kv_heads < now.number or now.number % n_kv_heads:
        fitting = [n for n in range(1, now.number) if now.number % n == 0]
        raise ArgumentError(
            f"group_heads: n_kv_heads={n_kv_heads!r}, where the model has {now.number}. Give a "
            f"smaller number that divides it: {', '.join(map(str, fitting)) or 'there is none'}."
        )
    return batches


def _sources(model: nn.Module, now: KvHeads, batch: Any) -> list[Source]:
    """Every attention, with all that must be known of it to change it."""
    attentions = [one for one in find_attentions(model, batch) if one.nth == 0]
    with traced(model, attentions, batch) as traces:
        layouts = {one: layout_of(one, trace) for one, trace in traces.items()}
        free = {one: _freedoms(model, trace, layouts[one]) for one, trace in traces.items()}
    for one, layout in layouts.items():
        _check_layout(one, layout, now.number)
    shares = find_ownership(model, attentions, batch)
    return [Source(one, layouts[one], *free[one], shares[one]) for one in attentions]


def _freedoms(model: nn.Module, trace: Trace, layout: Layout) -> tuple[Symmetries, Symmetries]:
    """What may be done to keys and to values."""
    # Where they are clipped, mixing would change what is clipped, though perhaps not just now.
    if getattr(getattr(model, "config", None), "clip_qkv", None) is not None:
        return none_free(), none_free()
    return symmetries_of_keys(trace, layout), symmetries_of_values(trace, layout)


def _layouts(small: nn.Module, n_kv_heads: int, batch: Any) -> list[Layout]:
    """Where queries, keys and values come from in a model that has its new shape."""
    try:
        attentions = [one for one in find_attentions(small, batch) if one.nth == 0]
    except (RuntimeError, ValueError, IndexError) as error:
        raise UnsupportedError(
            f"group_heads: {type(small).__name__} does not run with {n_kv_heads} kv heads "
            f"({str(error).splitlines()[0]}). Leave its heads as they are."
        ) from error
    with traced(small, attentions, batch) as traces:
        layouts = {one: layout_of(one, trace) for one, trace in traces.items()}
    for one, layout in layouts.items():
        _check_layout(one, layout, n_kv_heads)
    return [*layouts.values()]


def _check_layout(attention: Attention, layout: Layout, n_kv_heads: int) -> None:
    if layout.n_kv_heads != n_kv_heads:
        raise UnsupportedError(
            f"group_heads: {attention.site.name} has {layout.n_kv_heads} kv heads where the "
            f"configuration says {n_kv_heads}: it would not follow. Leave its heads as they are."
        )


def _prove(small: nn.Module, batch: Any, wanted: list[Tensor]) -> None:
    """Refuse a model that does not give what it gives with keys and values repeated."""
    # Of a model in double precision, too, many parts turn and divide in single precision.
    apart = output_difference(float_outputs(small, batch), wanted, tolerance=1e-5)
    if apart:
        raise UnsupportedError(
            f"group_heads: with its heads in another order the answer of {type(small).__name__} "
            f"would be {apart}. Something outside the attention knows which heads there were, "
            f"such as position biases. Leave its heads as they are."
        )
