"""`group_heads`: grouped-query or multi-query attention from a model with more kv heads."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._count_names import CONFIG_KV_HEADS
from headwise._display import first_line
from headwise._evaluation import in_evaluation
from headwise._progress import shows_progress
from headwise.capture import InputTracker
from headwise.checkpoints import (
    apply_checked,
    compose_heads,
    differences_between,
    differences_of,
    set_original_heads,
)
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import around, check_model, hooked, without_compiler
from headwise.ownership import (
    Attention,
    batches_of,
    call_model,
    edit_heads,
    example_input,
    find_attentions,
    find_ownership,
    float_outputs,
    output_difference,
)
from headwise.surgery._prune import refuse_packed
from headwise.surgery.grouping._layer import GroupedLayer, Grouping, UngroupedLayer
from headwise.surgery.grouping._rows import Layout, Trace, layout_of, traced
from headwise.surgery.grouping._symmetries import (
    Symmetries,
    none_free,
    symmetries_of_keys,
    symmetries_of_values,
)

# Every direction gets a little weight, since no sample of texts covers all inputs.
_RIDGE = 1e-3


@shows_progress("Grouping heads")
@torch.inference_mode(False)
def group_heads(
    model: nn.Module,
    n_kv_heads: int,
    *,
    reference: Iterable[Any] | None = None,
    on_layer: Callable[[GroupedLayer], None] | None = None,
) -> nn.Module:
    """Group the heads of a copy of a model to share keys and values: fewer kv heads, smaller cache.

    Similar kv heads form groups of equal size, wherever they were, and their query heads are
    reordered to match. Each group shares the keys and values that lose least in the logits and
    in the output. A head may read the shared features through a linear map of its own: its
    queries and output weights absorb that map at no cost. Which maps leave the attention
    unchanged is measured on the running model, without a list of architectures: values, and
    features of keys that positions do not rotate, may be mixed in any way; features under RoPE
    may be rotated and scaled in the same pairs; features under a norm are averaged. Grouping is
    exact where heads differ only by such maps.

    Otherwise the model loses accuracy: train it further, for about a twentieth of its original
    training (Ainslie et al. 2023). Its output is checked against that of `model` with each head's
    keys and values replaced by those of its group. Its configuration has the new number, so that
    stock transformers loads what `save_pretrained` writes.

    Args:
        model: A Hugging Face model whose configuration has `num_key_value_heads`, or a
            `SentenceTransformer` around one. It is not changed.
        n_kv_heads: Key/value heads per layer: a divisor of their present number.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or the only
            one. The fit minimizes the loss on them. None minimizes it over isotropic inputs.
        on_layer: Called after each layer with a `GroupedLayer`: its groups, what was mixed and
            what is lost.
    Returns:
        The grouped model, in the mode of the model.
    Raises:
        ArgumentError: the number is not a smaller divisor of the present number, or the
            reference is empty or holds texts.
        UnsupportedError: the configuration has no number of kv heads, heads were pruned before,
            keys or values are not rows of a linear layer, positions are bound to heads, or
            weights are quantized, under adapters or spread over devices.
    Source:
        Grouped heads: Ainslie et al. 2023 (arXiv:2305.13245); leading directions: Yu et al. 2024
        (arXiv:2406.07056); equality up to absorbed maps: Jin et al. 2024 (arXiv:2412.20677).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, intermediate_size=16, **sizes))
        >>> small = group_heads(model, 2)
        >>> small.config.num_key_value_heads, small.model.layers[0].self_attn.k_proj.out_features
        (2, 8)
    """
    outer, model = without_compiler(model), check_model("group_heads", model)
    refuse_packed(model, "group_heads")
    name, number = _kv_head_count(model)
    batches = batches_of(reference, "group_heads")
    if type(n_kv_heads) is not int or not 0 < n_kv_heads < number or number % n_kv_heads:
        divisors = [n for n in range(1, number) if number % n == 0]
        raise ArgumentError(
            f"group_heads: n_kv_heads={n_kv_heads!r}, but the model has {number}. Give a "
            f"smaller number that divides it: {', '.join(map(str, divisors)) or 'there is none'}."
        )
    batch = batches[0] if batches else example_input(model)
    layers = _layers(model, number, batch)
    factors = _covariance_factors(model, {x.attention: x.layout for x in layers}, batches)
    small = deepcopy(model)
    groupings = []
    for layer in layers:
        grouping = Grouping.fitted(model, layer, n_kv_heads, factors)
        grouping.write_repeated(model, small)
        groupings.append(grouping)
        if on_layer is not None:
            on_layer(grouping.summary())
    expected = float_outputs(small, batch)
    _change_kv_head_count(small, name, n_kv_heads)
    for grouping, layout in zip(groupings, _layouts(small, n_kv_heads, batch), strict=True):
        grouping.write_grouped(model, small, layout)
    # Even in a double-precision model, many parts rotate and divide in single precision.
    error = output_difference(float_outputs(small, batch), expected, tolerance=1e-5)
    if error:
        raise UnsupportedError(
            f"group_heads: with its heads in another order the output of {type(small).__name__} "
            f"would be {error}. Something outside the attention depends on the order of heads, "
            f"such as position biases. Leave its heads as they are."
        )
    orders = {grouping.layer.attention.module: grouping.order for grouping in groupings}
    attentions = find_attentions(model, batch)
    heads = {(a.site.stack, a.site.layer): orders[a.module] for a in attentions}
    set_original_heads(small, compose_heads(model, heads))
    return small if outer is model else around(outer, small)


def _kv_head_count(model: nn.Module) -> tuple[str, int]:
    """The name of the number of kv heads in the configuration of a model, and the number.

    Raises:
        UnsupportedError: the configuration has no such number, or does not describe the model.
    """
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    names = (name for name in CONFIG_KV_HEADS if type(getattr(config, name, None)) is int)
    name = next(names, None)
    if name is None or not hasattr(config, "to_dict"):
        raise UnsupportedError(
            f"group_heads: {kind} has no {' or '.join(CONFIG_KV_HEADS)} in its configuration, "
            f"so that its heads cannot share keys and values. Remove heads instead, with prune."
        )
    differences = (differences_of(model) or {}).values()
    changed = [name for names in differences for name in names]
    if changed:
        raise UnsupportedError(
            f"group_heads: {kind} differs from its configuration (in {changed[0]}), as after "
            f"heads were pruned. Group its heads first, then prune."
        )
    return name, getattr(config, name)


def _change_kv_head_count(model: nn.Module, name: str, number: int) -> None:
    """Change the number in a model and its configuration.

    Weights that change their shape keep the first part of their values; the caller overwrites
    them.
    """
    config: Any = model.config
    setattr(config, name, number)
    with torch.device("meta"):
        expected = type(model)(deepcopy(config))
    changes = differences_between(expected, model)
    before = {tensor: model.get_parameter(tensor).detach() for tensor in changes["tensors"]}
    apply_checked(model, changes)
    with torch.no_grad():
        for tensor, old in before.items():
            weight = model.get_parameter(tensor)
            weight.copy_(old[tuple(map(slice, weight.shape))])


def _layers(model: nn.Module, number: int, batch: Any) -> list[UngroupedLayer]:
    """Every attention, with its layout, symmetries and ownership."""
    attentions = [a for a in find_attentions(model, batch) if a.nth == 0]
    with traced(model, attentions, batch) as traces:
        layouts = {a: layout_of(a, trace) for a, trace in traces.items()}
        symmetries = {a: _symmetries(model, trace, layouts[a]) for a, trace in traces.items()}
    for attention, layout in layouts.items():
        _check_layout(attention, layout, number)
    ownership = find_ownership(model, attentions, batch)
    return [UngroupedLayer(a, layouts[a], *symmetries[a], ownership[a]) for a in attentions]


@torch.no_grad()
def _covariance_factors(
    model: nn.Module, layouts: Mapping[Attention, Layout], batches: list[Any]
) -> dict[str, Float[Tensor, "m m"]]:
    """Return a Cholesky factor of the second moments of each layer's input.

    A constant 1 is appended to the input, for the bias. Padding tokens are left out. Without
    batches there are no factors, which stands for isotropic inputs.
    """
    moments: dict[str, Tensor] = {}
    with in_evaluation(model), edit_heads(model, [*layouts], lambda _, heads: heads) as inputs:
        hooks = [
            (
                model.get_submodule(name),
                partial(_add_moments, moments, name, inputs, attention.site.stack),
            )
            for attention, layout in layouts.items()
            for name in {rows.name for rows in (layout.q, layout.k, layout.v)}
        ]
        with hooked(before=hooks):
            for batch in batches:
                call_model(model, batch)
    factors = {}
    for name, moment in moments.items():
        ridge = _RIDGE * moment.diagonal().mean()
        factors[name] = torch.linalg.cholesky(moment + ridge * torch.eye(len(moment)).to(moment))
    return factors


def _add_moments(
    moments: dict[str, Tensor], name: str, inputs: InputTracker, stack: str, _: nn.Module, args: Any
) -> None:
    x = args[0].detach()
    real = inputs.of(stack).text.real
    x = x[real.to(x.device)] if real is not None and real.shape == x.shape[:2] else x
    x = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, -2).double()
    moments[name] = moments.get(name, 0) + x.T @ x


def _symmetries(model: nn.Module, trace: Trace, layout: Layout) -> tuple[Symmetries, Symmetries]:
    """The symmetries of keys and of values."""
    # Mixing would change which values are clipped, even if it does not on this batch.
    if getattr(getattr(model, "config", None), "clip_qkv", None) is not None:
        return none_free(), none_free()
    return symmetries_of_keys(trace, layout), symmetries_of_values(trace, layout)


def _layouts(small: nn.Module, n_kv_heads: int, batch: Any) -> list[Layout]:
    """The rows that produce queries, keys and values in a model of the new shape."""
    try:
        attentions = [a for a in find_attentions(small, batch) if a.nth == 0]
    except (RuntimeError, ValueError, IndexError) as error:
        raise UnsupportedError(
            f"group_heads: {type(small).__name__} does not run with {n_kv_heads} kv heads "
            f"({first_line(error, 1000)}). Leave its heads as they are."
        ) from error
    with traced(small, attentions, batch) as traces:
        layouts = {a: layout_of(a, trace) for a, trace in traces.items()}
    for attention, layout in layouts.items():
        _check_layout(attention, layout, n_kv_heads)
    return [*layouts.values()]


def _check_layout(attention: Attention, layout: Layout, n_kv_heads: int) -> None:
    if layout.n_kv_heads != n_kv_heads:
        raise UnsupportedError(
            f"group_heads: {attention.site.name} has {layout.n_kv_heads} kv heads where the "
            f"configuration says {n_kv_heads}, so it ignores the configuration. Leave its heads "
            f"as they are."
        )
