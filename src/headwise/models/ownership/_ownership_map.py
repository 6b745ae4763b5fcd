"""Which index of which weight belongs to which head: found by gradients, no architecture known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from headwise._evaluation import in_evaluation
from headwise._interrupts import reversible, slowly_reversible
from headwise.errors import UnsupportedError
from headwise.models._hooks import hooked
from headwise.models.capture import AttentionCall, capture_calls
from headwise.models.ownership._attention import Attention
from headwise.models.ownership._example_input import call_model
from headwise.models.ownership._projection import is_linear, is_transposed

NOBODY = -1


@dataclass(frozen=True)
class OwnershipMap:
    """Whose each index along one axis of a weight is.

    Attributes:
        name: The qualified name of the weight, a parameter or a buffer.
        axis: The axis that heads lie along.
        heads: The query head of each index; -1 where it belongs to none.
        kv_heads: The key/value head of each index; -1 where it belongs to none.
    """

    name: str
    axis: int
    heads: Int[Tensor, " n"]
    kv_heads: Int[Tensor, " n"]


@dataclass(frozen=True)
class HeadCounts:
    """How many heads there are."""

    heads: int
    kv_heads: int


def count_heads(attention: Attention, shares: Sequence[OwnershipMap]) -> HeadCounts:
    """How many heads an attention has, kv heads as its weights have them."""
    H = attention.site.n_heads
    most = max(int(share.kv_heads.max()) for share in shares) + 1
    return HeadCounts(H, most or (1 if attention.site.n_kv_heads == 1 else H))


def find_ownership(
    model: nn.Module, attentions: list[Attention], batch: Any
) -> dict[Attention, list[OwnershipMap]]:
    """Find whose every index of the weights around each attention is, by running the model once.

    An index belongs to a head when that head's query, key, value or output depends on it and
    no other head's does; to a key/value head when those of the query heads that read it do.
    Layers that share their weights have the shares of the first of them.

    Returns:
        The shares of each attention, those of its output projection included. An index that
        all heads depend on belongs to nobody.
    Raises:
        UnsupportedError: heads depend on one another before they are mixed.
    """
    first: dict[nn.Module, Attention] = {}
    for attention in attentions:
        first.setdefault(attention.module, attention)
    with attached_parts(model, first, batch) as parts:
        found = {module: _of_attention(model, a, parts[module]) for module, a in first.items()}
    return {attention: found[attention.module] for attention in attentions}


# Queries, keys, values, and "out", the heads as they are mixed; heads lie along the first axis.
Parts = dict[str, Tensor]
# For one weight and what depends on it: of each head, which entries of the weight that are.
Reach = dict[str, Bool[Tensor, "_ ..."]]


@slowly_reversible
def attached_parts(
    model: nn.Module, first: dict[nn.Module, Attention], batch: Any
) -> Iterator[dict[nn.Module, Parts]]:
    """Run a model once, and give the parts of each attention with all that they depend on.

    Inside the block gradients reach every weight, frozen ones and buffers included.

    Args:
        first: By module the first attention of those that share it.
    """
    with in_evaluation(model), _all_attached(model), torch.enable_grad():
        yield _run_attached(model, first, batch)


@reversible
def _all_attached(model: nn.Module) -> Iterator[None]:
    """Ask for gradients of everything of a model, frozen weights and buffers included."""
    everything = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    asked = [x.requires_grad for x in everything]
    for x in everything:
        x.requires_grad_(True)
    try:
        yield
    finally:
        for x, one in zip(everything, asked, strict=True):
            x.requires_grad_(one)


def _run_attached(
    model: nn.Module, first: dict[nn.Module, Attention], batch: Any
) -> dict[nn.Module, Parts]:
    """The queries, keys, values and joined heads of each attention, with their gradients."""
    parts: dict[nn.Module, Parts] = {module: {} for module in first}

    @torch.enable_grad()  # listeners work without
    def hear(call: AttentionCall) -> None:
        shown = {"q": call.q, "k": call.k, "v": call.v}
        for name, x in shown.items():
            # Attention that is written out shows its queries and keys to nobody: width 0.
            if call.module in parts and call.q.shape[-1] and x.requires_grad:
                parts[call.module].setdefault(name, x.transpose(0, 1))

    def note(attention: Attention, _: nn.Module, args: tuple[Any, ...]) -> None:
        heads = args[0].unflatten(-1, (attention.site.n_heads, -1))
        parts[attention.module].setdefault("out", heads.movedim(-2, 0))

    notes = [(attention.output.module, partial(note, attention)) for attention in first.values()]
    with hooked(before=notes), capture_calls(model, hear, keep_graph=True):
        call_model(model, batch)
    return parts


def _of_attention(model: nn.Module, attention: Attention, parts: Parts) -> list[OwnershipMap]:
    output = attention.output
    weights = _weights_around(model, attention)
    reach = _reach(parts, weights)
    shares = [
        share
        for name, weight in weights.items()
        if name.rpartition(".")[0] != output.name
        for axis in range(weight.ndim)
        if (share := _share(name, axis, reach[name])) is not None
    ]
    wide = [reach[share.name] for share in shares if weights[share.name].ndim > 1]
    _check_apart(attention, parts, wide)
    columns = torch.arange(attention.site.n_heads).repeat_interleave(output.per_head.shape[1])
    nobody = torch.full_like(columns, NOBODY)
    whole = OwnershipMap(f"{output.name}.weight", output.in_axis, columns, nobody)
    return [*_with_biases(model, shares), whole]


def _check_apart(attention: Attention, parts: Parts, wide: list[Reach]) -> None:
    """Refuse heads whose queries, keys or values no weight can be cut for."""
    words = {"q": "queries", "k": "keys", "v": "values", "out": "outputs"}
    for part in [part for part in parts if part != "out"] or ["out"]:
        if len(parts[part]) > 1 and not any(part in reach for reach in wide):
            raise UnsupportedError(
                f"heads: the {words[part]} of the heads of {attention.site.name} depend on one "
                f"another, as under a norm over all of them, so that no head can be cut out "
                f"exactly. Ablate its heads instead."
            )


def _weights_around(model: nn.Module, attention: Attention) -> dict[str, Tensor]:
    """The weights and buffers of the smallest module with both the attention and its output."""
    prefix = attention.around
    module = model.get_submodule(prefix)
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    dot = f"{prefix}." if prefix else ""
    return {dot + name: x for name, x in found.items() if x.is_floating_point()}


def _reach(parts: Parts, weights: dict[str, Tensor]) -> dict[str, Reach]:
    """Which entries of each weight the heads of each part depend on.

    What heads give depends on their queries, keys and values too: it tells of what those don't.
    """
    found: dict[str, Reach] = {name: {} for name in weights}
    for part in sorted(parts, key="qkv".find, reverse=True):
        heads = parts[part]
        # Drawn, since under equal factors gradients could cancel; the same in each run.
        factors = torch.randn(heads.shape[1:], generator=torch.Generator().manual_seed(0))
        asked = {name: x for name, x in weights.items() if part != "out" or not found[name]}
        rows = [
            torch.autograd.grad(
                (head * factors.to(head)).sum(),
                [*asked.values()],
                retain_graph=True,
                allow_unused=True,
            )
            for head in heads
        ]
        for name, grads in zip(asked, zip(*rows, strict=True), strict=True):
            if any(grad is not None for grad in grads):
                nothing = torch.zeros_like(asked[name])
                touched = [(nothing if grad is None else grad) != 0 for grad in grads]
                found[name][part] = torch.stack(touched)
    return found


def _share(name: str, axis: int, reach: Reach) -> OwnershipMap | None:
    """Whose each index along an axis is; None where no head has one, or several share some."""
    owners = [_owners(part, touched.movedim(axis + 1, 1)) for part, touched in reach.items()]
    told = [one for one in owners if one is not None]
    if not told or len(told) < len(owners):
        return None
    heads = torch.stack([one[0] for one in told]).amax(0)
    kv_heads = torch.stack([one[1] for one in told]).amax(0)
    both = (heads != NOBODY) & (kv_heads != NOBODY)
    if (heads != kv_heads)[both].any() or (heads + kv_heads == 2 * NOBODY).all():
        return None
    return OwnershipMap(name, axis, heads, kv_heads.masked_fill(both, NOBODY))


def _owners(part: str, touched: Bool[Tensor, "H n *_"]) -> tuple[Tensor, Tensor] | None:
    """The query head and the kv head that each index belongs to; None if several share one.

    An index that one head uses is that head's, one that a group of neighbors uses is that of the
    kv head which they read, and one that all use is nobody's.
    """
    users = (touched.flatten(2).any(2) if touched.ndim > 2 else touched).cpu()  # H n
    n_heads = len(users)
    count, first = users.sum(0), users.int().argmax(0)
    last = n_heads - 1 - users.flip(0).int().argmax(0)
    used = count.clamp(min=1)
    neighbors = (last - first + 1 == used) & (first % used == 0)
    all_use = count == n_heads
    if not (neighbors | all_use | (count == 0)).all():
        return None
    owned = (count > 0) & ~all_use
    of_kv = owned & ((count > 1) | (part in ("k", "v")))
    heads = torch.where(owned & ~of_kv, first, NOBODY)
    return heads, torch.where(of_kv, first // used, NOBODY)


def _with_biases(model: nn.Module, shares: list[OwnershipMap]) -> list[OwnershipMap]:
    """The same, and each bias as the rows that it is added to.

    A bias of keys changes no output, since it shifts all logits of a query alike: gradients
    cannot always tell whose it is.
    """
    found = {(share.name, share.axis): share for share in shares}
    for share in shares:
        place, _, kind = share.name.rpartition(".")
        module = model.get_submodule(place)
        out_axis = 1 if is_transposed(module) else 0
        rows = kind == "weight" and is_linear(module) and share.axis == out_axis
        if rows and getattr(module, "bias", None) is not None:
            found[f"{place}.bias", 0] = replace(share, name=f"{place}.bias", axis=0)
    return [*found.values()]
