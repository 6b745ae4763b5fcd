"""`prune`: cut heads out of a model, and check that the result equals the ablated model."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise._display import first_line
from headwise.checkpoints import TorchCompatibleAttention, compose_heads, set_original_heads
from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import Hooks, around, check_model, check_weights, fingerprint, without_compiler
from headwise.ownership import (
    Attention,
    batches_of,
    differs_from_itself,
    edit_heads,
    example_input,
    find_attentions,
    float_outputs,
    heads_of,
    mean_heads,
    output_difference,
    run,
)
from headwise.surgery._cut import cut_heads, fold_into_bias
from headwise.surgery._plan import Plan
from headwise.tables import HeadsLike


@torch.inference_mode(False)
def prune(
    model: nn.Module,
    plan: Plan | HeadsLike,
    *,
    fold: Literal["mean"] | None = None,
    reference: Iterable[Any] | None = None,
    expand: bool = False,
) -> nn.Module:
    """Cut heads out of a copy of a model.

    The smaller model computes what the model computes while `ablate` removes the same heads: they
    contribute zeros, or under `fold="mean"` their mean over the reference, which is added to the
    bias of the output projection at no cost. Both models are run once to check this; heads that
    cannot be cut exactly are refused. Gradients show which index of which weight belongs to which
    head, so no list of architectures is needed. The heads that are left are renumbered from 0.

    If all query heads of a kv head are removed, its keys and values go too, and their cache. Heads
    with position biases that the model makes for all heads (ALiBi, MPNet, T5) keep their own
    biases. `nn.MultiheadAttention` cannot be narrower than its input, so a layer with the same
    arguments replaces it; the weights that it returns are those of the heads that are left.

    Args:
        model: It is not changed. For a `SentenceTransformer`, the transformer in it is pruned and
            the result is a `SentenceTransformer` too.
        plan: A plan, or the heads to remove: `"L5.H3"`, `(5, 3)`, a list of either, or `{5: [3]}`.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or a single
            argument. The mean is taken over all of them; the first one is used for the check.
        expand: Whether kv heads may be copied for single query heads where groups would otherwise
            differ in size. The copies make the cache larger.
    Returns:
        The smaller model, in the training or evaluation mode of the model.
    Raises:
        HeadError: a head does not exist, is named twice, or is the last of its layer.
        ArgumentError: the plan is for another model, `fold` is given without a reference, or the
            reference holds texts.
        UnsupportedError: the heads cannot be cut out exactly, or the weights are quantized,
            under adapters or spread over devices.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> small = prune(MultiHeadAttention(8, 4), [(0, 1), (0, 2)])
        >>> small.n_heads, tuple(small.q_proj.weight.shape)
        (2, (4, 8))
    """
    outer, model = without_compiler(model), check_model("prune", model)
    if fold not in (None, "mean"):
        raise ArgumentError(f"prune: fold={fold!r}. Choose 'mean' or None.")
    batches = batches_of(reference, "prune")
    if fold and not batches:
        raise ArgumentError("prune: fold='mean' without a reference. Give batches to average over.")
    _refuse_packed(model)
    batch = batches[0] if batches else example_input(model)
    attentions = find_attentions(model, batch)
    kept = _kept(_checked_plan(plan, model, attentions), attentions)
    small, counterparts = cut_heads(model, kept, batch, expand=expand)
    removed = {
        attention: [head for head in range(attention.site.n_heads) if head not in heads]
        for attention, heads in kept.items()
    }
    means = mean_heads(model, attentions, batches) if fold else None
    if means is not None:
        _fold(small, counterparts, removed, means)

    def without_removed(attention: Attention, outputs: Float[Tensor, "*lead H Dv"]) -> Tensor:
        gone, edited = removed[attention], outputs.clone()
        edited[..., gone, :] = 0 if means is None else means[attention][gone].to(outputs)
        return edited

    with edit_heads(model, attentions, without_removed):
        expected = float_outputs(model, batch)
    _check_equal(model, small, expected, batch)
    # A short text makes a BigBird compute full attention for good, unlike what its configuration
    # says.
    config: Any = getattr(small, "config", None)
    kinds = {getattr(module, "attention_type", None) for module in small.modules()} - {None}
    if len(kinds) == 1 and isinstance(getattr(config, "attention_type", None), str):
        config.attention_type = kinds.pop()
    if any(removed.values()):
        layers = {(a.site.stack, a.site.layer): heads for a, heads in kept.items()}
        set_original_heads(small, compose_heads(model, layers))
    return small if outer is model else around(outer, small)


def _refuse_packed(model: nn.Module) -> None:
    """Refuse a model with packed, sharded or adapted weights."""
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"prune: {type(model).__name__} holds adapters. Call merge_and_unload() first."
        )
    check_weights("prune", model)
    for name, weight in model.named_parameters():
        if type(weight.data) is not Tensor or not weight.is_floating_point():
            raise UnsupportedError(
                f"prune: {name} is {type(weight.data).__name__} of {weight.dtype}. Gather "
                f"sharded weights and unpack quantized ones first."
            )


def _checked_plan(plan: Plan | HeadsLike, model: nn.Module, attentions: list[Attention]) -> Plan:
    """The plan, if it is for this model."""
    if not isinstance(plan, Plan):
        return Plan.of(plan, heads_of(attentions))
    if plan.model and plan.model != (actual := fingerprint(model)):
        raise ArgumentError(
            f"prune: the plan is for the model {plan.model}, and this one is {actual}. Plan anew."
        )
    planned = {(layer.stack, layer.layer): layer.n_heads for layer in plan.layers}
    sizes = {(a.site.stack, a.site.layer): a.site.n_heads for a in attentions}
    if planned != sizes:
        raise ArgumentError(
            f"prune: the plan is for layers of {sorted(planned.values())} heads, and the model "
            f"has {sorted(sizes.values())}. Plan anew."
        )
    return plan


def _kept(plan: Plan, attentions: list[Attention]) -> dict[Attention, tuple[int, ...]]:
    """The heads that stay in each attention."""
    layers = {(layer.stack, layer.layer): layer for layer in plan.layers}
    kept = {a: layers[a.site.stack, a.site.layer].keep for a in attentions}
    by_module: dict[nn.Module, tuple[int, ...]] = {}
    for attention, heads in kept.items():
        if by_module.setdefault(attention.module, heads) != heads:
            raise UnsupportedError(
                f"prune: {attention.site} is shared by several layers, which would keep "
                f"different heads. Remove the same heads from all of them."
            )
    return kept


def _fold(
    small: nn.Module,
    counterparts: Mapping[Attention, Attention],
    removed: Mapping[Attention, Sequence[int]],
    means: Mapping[Attention, Float[Tensor, "H Dv"]],
) -> None:
    """Add the mean contributions of the removed heads to the biases of the output projections."""
    for attention, heads in removed.items():
        if heads and attention.nth:
            raise UnsupportedError(
                f"prune: {attention.site} is shared by several layers, whose means differ, "
                f"and has one bias for all. Prune without fold."
            )
        if heads:
            weight = attention.output.per_head[heads].detach()
            mean = means[attention][heads].to(weight)
            constant = torch.einsum("hv,hvd->d", mean, weight)
            fold_into_bias(small, counterparts[attention], constant)


def _check_equal(model: nn.Module, small: nn.Module, expected: list[Tensor], batch: Any) -> None:
    """Refuse a smaller model whose outputs differ from those of the ablated model."""
    try:
        actual = float_outputs(small, batch)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UnsupportedError(
            f"prune: without these heads {type(model).__name__} does not run "
            f"({first_line(error, 1000)}): {_failing_module(small, batch)} depends on the number "
            f"of heads, as with a fixed width in a reshape or position biases of all heads. "
            f"Ablate them instead."
        ) from error
    if isinstance(small, TorchCompatibleAttention):  # its weights are a mean over other heads
        actual, expected = actual[:1], expected[:1]
    problem = output_difference(actual, expected)
    if problem and differs_from_itself(model, batch):
        raise UnsupportedError(
            f"prune: {type(model).__name__} is not deterministic: the same input gives two "
            f"different outputs, so those without these heads cannot be compared. "
            f"Ablate them instead."
        )
    if problem:
        raise UnsupportedError(
            f"prune: the output of {type(model).__name__} without these heads would be {problem}. "
            f"Something else depends on which heads there are, such as position biases of all "
            f"heads, or weights with heads in another order. Ablate them instead."
        )


def _failing_module(model: nn.Module, batch: Any) -> str:
    """The innermost module in which a model that does not run fails."""
    running: list[str] = []

    def enter(described: str, *_: Any) -> None:
        running.append(described)

    def leave(*_: Any) -> None:
        running.pop()

    with Hooks() as hooks:
        for name, module in model.named_modules():
            described = f"{name} ({type(module).__name__})".lstrip()
            hooks.before(module, partial(enter, described))
            hooks.after(module, leave)
        with suppress(Exception):  # the one that was raised before
            run(model, batch)
    return running[-1]
