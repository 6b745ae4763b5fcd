"""Make a smaller model: heads cut out of the weights, and proved equal to heads taken away."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import ArgumentError, UnsupportedError
from headwise.models import (
    Attention,
    around,
    batches_of,
    check_model,
    compose_heads,
    edit_heads,
    example_input,
    find_attentions,
    find_ownership,
    fingerprint,
    heads_of,
    mean_heads,
    set_original_heads,
)
from headwise.surgery._outputs import answer_of, difference
from headwise.surgery._plan import Plan
from headwise.surgery.cutting import (
    InPlaceOfTorch,
    bound_to_biases,
    carry_biases,
    choose,
    cut,
    fold_into_bias,
    is_bias_table,
    keep_heads,
    put_in_place,
)
from headwise.tables import HeadsLike


def prune(
    model: nn.Module,
    plan: Plan | HeadsLike,
    *,
    fold: Literal["mean"] | None = None,
    reference: Iterable[Any] | None = None,
    expand: bool = False,
) -> nn.Module:
    """Cut heads out of a copy of a model.

    The smaller model gives what the model gives while `ablate` takes the same heads away: zeros
    for them, or under `fold="mean"` their mean over the reference, which is added to the bias
    of the output projection and costs nothing. That it does is checked by running both once;
    what cannot be cut exactly is refused. Which index of which weight goes is found by gradients
    and needs no list of architectures. The heads that are left are numbered anew.

    Removing all query heads of a kv head removes its keys and values too, and their cache. Heads
    that are bound to position biases which the model makes for all of them (ALiBi, MPNet, T5) take
    theirs with them. In place of `nn.MultiheadAttention`, which cannot be narrower than its input,
    stands a layer that is called in the same way; the weights it tells are of the heads left.

    Args:
        model: It stays as it is. Of a `SentenceTransformer`, the transformer in it is pruned; the
            result is a `SentenceTransformer` too.
        plan: A plan, or the heads that go, in any way of naming them.
        reference: Batches, each the model's keyword arguments, a tuple of arguments or the only
            one. They are what the mean is taken over; the first is what the model is checked on.
        expand: Whether each query head may be given its own keys and values where its group
            would be smaller than others. It makes the cache larger.
    Returns:
        The smaller model, in the mode of the model.
    Raises:
        HeadError: a head does not exist, is named twice, or is the last of its layer.
        ArgumentError: the plan is for another model, `fold` is given without a reference, or the
            reference holds texts.
        UnsupportedError: the heads cannot be cut out exactly, or the weights are quantised,
            under adapters or spread over devices.

    Example:
        >>> from headwise.layer import MultiHeadAttention
        >>> small = prune(MultiHeadAttention(8, 4), [(0, 1), (0, 2)])
        >>> small.n_heads, tuple(small.q_proj.weight.shape)
        (2, (4, 8))
    """
    outer, model = model, check_model("prune", model)
    batches = _checked(model, fold, reference)
    batch = batches[0] if batches else example_input(model)
    attentions = find_attentions(model, batch)
    plan = _fitting(plan, model, attentions)
    kept = _kept(plan, attentions)
    first = {a: stay for a, stay in kept.items() if a.nth == 0 and len(stay) < a.site.n_heads}
    small = put_in_place(deepcopy(model), [a.site.name for a in first if not a.called])
    parts = dict(zip(attentions, find_attentions(small, batch), strict=True))
    shares = find_ownership(small, [parts[a] for a in first], batch)
    bound = bound_to_biases(model, kept, batch)
    for attention, heads in first.items():
        part, own = parts[attention], shares[parts[attention]]
        keep = choose(part, own, heads, expand)
        whole = attention in bound  # then so are the biases that it makes
        cut(small, part, [one for one in own if not (whole and is_bias_table(one))], keep)
    carry_biases(bound, small, kept)
    keep_heads(small, {parts[a].module: heads for a, heads in first.items()})
    removed = {a: [h for h in range(a.site.n_heads) if h not in stay] for a, stay in kept.items()}
    means = mean_heads(model, attentions, batches) if fold else None
    if means is not None:
        _fold(small, parts, removed, means)
    _prove(model, small, _Gone(attentions, removed, means), batch)
    _record(model, small, kept)
    return small if outer is model else around(outer, small)


def _record(model: nn.Module, small: nn.Module, kept: Mapping[Attention, tuple[int, ...]]) -> None:
    """Record which heads of the original model are left, unless none was removed."""
    if any(len(stay) < a.site.n_heads for a, stay in kept.items()):
        layers = {(a.site.stack, a.site.layer): stay for a, stay in kept.items()}
        set_original_heads(small, compose_heads(model, layers))


@dataclass(frozen=True)
class _Gone:
    """Which heads are gone from each attention, and what stands in their place."""

    attentions: list[Attention]
    heads: dict[Attention, list[int]]
    means: Mapping[Attention, Float[Tensor, "H Dv"]] | None

    def edit(self, attention: Attention, given: Float[Tensor, "*lead H Dv"]) -> Tensor:
        gone = self.heads[attention]
        left = given.clone()
        left[..., gone, :] = 0 if self.means is None else self.means[attention][gone].to(given)
        return left


def _checked(model: nn.Module, fold: str | None, reference: Iterable[Any] | None) -> list[Any]:
    if fold not in (None, "mean"):
        raise ArgumentError(f"prune: fold={fold!r}. Choose 'mean' or None.")
    batches = batches_of(reference, "prune")
    if fold and not batches:
        raise ArgumentError("prune: fold='mean' without a reference. Give batches to average over.")
    refuse_packed(model, "prune")
    return batches


def refuse_packed(model: nn.Module, who: str) -> None:
    """Refuse weights that are not there as they are: packed, sharded or under adapters.

    Raises:
        ArgumentError: the model is none.
        UnsupportedError: some are not.
    """
    check_model(who, model)
    if hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"{who}: {type(model).__name__} holds adapters. Call merge_and_unload() first."
        )
    for name, weight in model.named_parameters():
        if type(weight.data) is not Tensor or not weight.is_floating_point():
            raise UnsupportedError(
                f"{who}: {name} is {type(weight.data).__name__} of {weight.dtype}. Gather sharded "
                f"weights and unpack quantised ones first."
            )


def _fitting(plan: Plan | HeadsLike, model: nn.Module, attentions: list[Attention]) -> Plan:
    """The plan, if it is one for this model."""
    if not isinstance(plan, Plan):
        return Plan.of(plan, heads_of(attentions))
    if plan.model and plan.model != (own := fingerprint(model)):
        raise ArgumentError(
            f"prune: the plan is for the model {plan.model}, and this one is {own}. Plan anew."
        )
    planned = {(one.stack, one.layer): one.n_heads for one in plan.layers}
    sizes = {(a.site.stack, a.site.layer): a.site.n_heads for a in attentions}
    if planned != sizes:
        raise ArgumentError(
            f"prune: the plan is for layers of {sorted(planned.values())} heads, and the model "
            f"has {sorted(sizes.values())}. Plan anew."
        )
    return plan


def _kept(plan: Plan, attentions: list[Attention]) -> dict[Attention, tuple[int, ...]]:
    """Which heads stay in each attention."""
    layers = {(one.stack, one.layer): one for one in plan.layers}
    kept = {a: layers[a.site.stack, a.site.layer].keep for a in attentions}
    of_module: dict[nn.Module, tuple[int, ...]] = {}
    for attention, stay in kept.items():
        if of_module.setdefault(attention.module, stay) != stay:
            raise UnsupportedError(
                f"prune: {attention.site.name} is shared by several layers, which would keep "
                f"other heads each. Remove the same heads from all of them."
            )
    return kept


def _fold(
    small: nn.Module,
    parts: Mapping[Attention, Attention],
    removed: Mapping[Attention, Sequence[int]],
    means: Mapping[Attention, Float[Tensor, "H Dv"]],
) -> None:
    """Add what the heads that go give in the mean to the biases of their output projections."""
    for attention, gone in removed.items():
        if gone and attention.nth:
            raise UnsupportedError(
                f"prune: {attention.site.name} is shared by several layers, whose means differ, "
                f"and has one bias for all. Prune without fold."
            )
        if gone:
            weight = attention.output.per_head[gone].detach()
            mean = means[attention][gone].to(weight)
            fold_into_bias(small, parts[attention], torch.einsum("hv,hvd->d", mean, weight))


def _prove(model: nn.Module, small: nn.Module, gone: _Gone, batch: Any) -> None:
    """Refuse a smaller model that does not give what the model gives without these heads."""
    with edit_heads(model, gone.attentions, gone.edit):
        wanted = answer_of(model, batch)
    try:
        found = answer_of(small, batch)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UnsupportedError(
            f"prune: without these heads {type(model).__name__} does not run "
            f"({str(error).splitlines()[0]}): something outside the attention knows how many heads "
            f"there were, such as position biases made for all layers. Ablate them instead."
        ) from error
    if isinstance(small, InPlaceOfTorch):  # the weights beside it are means over other heads
        found, wanted = found[:1], wanted[:1]
    apart = difference(found, wanted)
    if apart:
        raise UnsupportedError(
            f"prune: the answer of {type(model).__name__} without these heads would be {apart}. "
            f"Something outside the attention knows which heads there were, such as position "
            f"biases made for all layers. Ablate them instead."
        )
