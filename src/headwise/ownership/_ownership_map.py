"""Which index of which weight belongs to which head, and which stay when heads are cut.

Ownership is found by gradients, for any architecture: no names of weights are listed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise._evaluation import differentiable_evaluation
from headwise.capture import AttentionCall, capture_calls
from headwise.errors import UnsupportedError
from headwise.models import hooked
from headwise.ownership._attention import Attention
from headwise.ownership._model_runs import call_model, random_like
from headwise.ownership._projection import is_batch_norm, is_linear, is_transposed

NO_HEAD = -1


@dataclass(frozen=True)
class OwnershipMap:
    """The ownership map of a weight: which head owns each index along one axis.

    Attributes:
        name: The qualified name of the weight, a parameter or a buffer.
        axis: The axis that the heads lie along.
        heads: The query head of each index; -1 if none owns it.
        kv_heads: The key/value head of each index; -1 if none owns it.
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


def count_heads(attention: Attention, maps: Sequence[OwnershipMap]) -> HeadCounts:
    """How many heads an attention has; kv heads are counted in its weights."""
    H = attention.site.n_heads
    if attention.lender is not None:
        return HeadCounts(H, attention.site.n_kv_heads)
    n_kv_heads = max(int(owners.kv_heads.max()) for owners in maps) + 1
    return HeadCounts(H, n_kv_heads or (1 if attention.site.n_kv_heads == 1 else H))


def find_ownership(
    model: nn.Module, attentions: list[Attention], batch: Any
) -> dict[Attention, list[OwnershipMap]]:
    """Find the ownership maps of the weights around each attention, by running the model once.

    A head owns an index if its query, key, value or output depends on it and no other head's
    does. A key/value head owns it if exactly the query heads that read that head depend on
    it. Layers that share their weights have the maps of the first of them.

    Returns:
        The maps of each attention, including those of its output projection. No head owns an
        index that all heads depend on.
    Raises:
        UnsupportedError: heads depend on one another before they are mixed.
    """
    first: dict[nn.Module, Attention] = {}
    for attention in attentions:
        first.setdefault(attention.module, attention)
    with attached_parts(model, first, batch) as (parts, origins):
        maps = {
            module: _maps_of(model, attention, parts[module], origins.get(module))
            for module, attention in first.items()
        }
    return {attention: maps[attention.module] for attention in attentions}


# Queries, keys, values and "out", what the output projection receives of the heads; heads lie along
# the first axis.
Parts = dict[str, Tensor]
# What computes the heads of an attention, in autograd.
Origin = torch.autograd.graph.Node
# For one weight, by part: per head, a mask of the entries that this part of the head depends on.
Dependence = dict[str, Bool[Tensor, "_ ..."]]


@contextmanager
def attached_parts(
    model: nn.Module, first: dict[nn.Module, Attention], batch: Any
) -> Iterator[tuple[dict[nn.Module, Parts], dict[nn.Module, Origin]]]:
    """Run a model once, and yield the parts of each attention with their autograd graph.

    With them come the origins of heads that are changed on their way to the output projection.

    Inside the block gradients reach every weight, including frozen ones and buffers.

    Args:
        first: For each module, the first attention that uses it.
    """
    with differentiable_evaluation(model, weights=True), _all_attached(model):
        yield _run_attached(model, first, batch)


@contextmanager
def _all_attached(model: nn.Module) -> Iterator[None]:
    """Require gradients of all weights of a model, including frozen ones and buffers.

    The statistics of a batch norm are left out: its function has no gradients of them.
    """
    statistics = {id(x) for norm in model.modules() if is_batch_norm(norm) for x in norm.buffers()}
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    tensors = [x for x in tensors if id(x) not in statistics]
    required = [x.requires_grad for x in tensors]
    try:
        for x in tensors:
            x.requires_grad_(True)
        yield
    finally:
        for x, before in zip(tensors, required, strict=True):
            x.requires_grad_(before)


def _run_attached(
    model: nn.Module, first: dict[nn.Module, Attention], batch: Any
) -> tuple[dict[nn.Module, Parts], dict[nn.Module, Origin]]:
    """The queries, keys, values and joined heads of each attention, with their gradients."""
    parts: dict[nn.Module, Parts] = {module: {} for module in first}
    computed: dict[nn.Module, tuple[Tensor, Origin | None]] = {}
    origins: dict[nn.Module, Origin] = {}

    @torch.enable_grad()  # callbacks run without gradients
    def record(call: AttentionCall) -> None:
        inputs = {"q": call.q, "k": call.k, "v": call.v}
        heads = call.heads if call.heads._base is None else call.heads._base
        # Now, since a model may change them in place.
        computed.setdefault(call.module, (call.heads.detach().transpose(1, 2), heads.grad_fn))
        for name, x in inputs.items():
            # The queries and keys of attention implemented by hand are unknown: width 0.
            if call.module in parts and call.q.shape[-1] and x.requires_grad:
                parts[call.module].setdefault(name, x.transpose(0, 1))

    def note(attention: Attention, _: nn.Module, args: tuple[Any, ...]) -> None:
        heads = attention.output.split(args[0])
        parts[attention.module].setdefault("out", heads.movedim(-2, 0))
        before, origin = computed.get(attention.module, (heads, None))
        is_whole = before.numel() == heads.numel()  # not where several calls make up the heads
        if origin is not None and is_whole and not before.reshape(heads.shape).equal(heads):
            origins.setdefault(attention.module, origin)

    notes = [(attention.output.module, partial(note, attention)) for attention in first.values()]
    with hooked(before=notes), capture_calls(model, record, keep_graph=True):
        call_model(model, batch)
    return parts, origins


def _maps_of(
    model: nn.Module, attention: Attention, parts: Parts, origin: Origin | None
) -> list[OwnershipMap]:
    output = attention.output
    if not parts["out"].requires_grad:
        raise UnsupportedError(
            f"heads: {attention.site} runs without gradients, as under torch.no_grad() inside "
            f"the model, so that it is unknown which weights belong to which head. Ablate its "
            f"heads instead."
        )
    weights = _weights_around(model, attention)
    dependence = _dependence(parts, weights, origin)
    _follow_biases(model, dependence)
    maps = [
        owners
        for name, weight in weights.items()
        if name.rpartition(".")[0] != output.name
        for axis in range(weight.ndim)
        if (owners := _map_of(name, axis, dependence[name])) is not None
    ]
    matrices = [dependence[owners.name] for owners in maps if weights[owners.name].ndim > 1]
    _check_separable(attention, parts, matrices)
    columns = torch.arange(attention.site.n_heads).repeat_interleave(output.per_head.shape[1])
    no_head = torch.full_like(columns, NO_HEAD)
    projection = OwnershipMap(f"{output.name}.weight", output.in_axis, columns, no_head)
    return [*_with_biases(model, maps), projection]


def _check_separable(attention: Attention, parts: Parts, matrices: list[Dependence]) -> None:
    """Refuse heads whose queries, keys or values cannot be removed from any weight matrix."""
    words = {"q": "queries", "k": "keys", "v": "values", "out": "outputs"}
    own = "q" if attention.lender is not None else "qkv"
    for part in [part for part in own if part in parts] or ["out"]:
        if len(parts[part]) > 1 and not any(part in dependence for dependence in matrices):
            raise UnsupportedError(
                f"heads: the {words[part]} of the heads of {attention.site} depend on one "
                f"another, as under a norm over all of them, so that no weight before it is one "
                f"head's own: they are neither cut nor counted by head. Ablate heads instead."
            )


def _weights_around(model: nn.Module, attention: Attention) -> dict[str, Tensor]:
    """The weights and buffers of the smallest module with both the attention and its output."""
    prefix = attention.around
    module = model.get_submodule(prefix)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    dot = f"{prefix}." if prefix else ""
    return {dot + name: x for name, x in tensors.items() if x.requires_grad}


def _dependence(
    parts: Parts, weights: dict[str, Tensor], origin: Origin | None
) -> dict[str, Dependence]:
    """Which entries of each weight the heads of each part depend on.

    Args:
        origin: What computes the heads, if they are changed before the output projection. Then the
            part "gate" is what this change depends on; its rows may lie among those of queries.
    """
    dependence: dict[str, Dependence] = {name: {} for name in weights}

    def add(part: str, heads: Tensor, tested: dict[str, Tensor]) -> None:
        for name, grads in zip(tested, gradients(heads, [*tested.values()]), strict=True):
            if any(grad is not None for grad in grads):
                zeros = torch.zeros_like(tested[name])
                nonzero = [(zeros if grad is None else grad) != 0 for grad in grads]
                dependence[name][part] = torch.stack(nonzero)

    for part in [part for part in "qkv" if part in parts]:
        add(part, parts[part], weights)
    if origin is not None:
        hook = origin.register_prehook(lambda grads: tuple(None for _ in grads))
        try:
            add("gate", parts["out"], weights)
        finally:
            hook.remove()
    # Outputs depend on all parts, so they only decide about the weights that no part depends on.
    unused = [name for name, uses in dependence.items() if not any(map(Tensor.any, uses.values()))]
    add("out", parts["out"], {name: weights[name] for name in unused})
    return dependence


def gradients(heads: Float[Tensor, "n ..."], tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """For each tensor its gradients for each head; None where there is none."""
    if not heads.requires_grad or not tensors:
        return [(None,) * len(heads) for _ in tensors]
    factors = random_like(heads[0])  # because gradients could cancel under equal ones
    rows = [
        torch.autograd.grad((head * factors).sum(), tensors, retain_graph=True, allow_unused=True)
        for head in heads
    ]
    return list(zip(*rows, strict=True))


def _follow_biases(model: nn.Module, dependence: dict[str, Dependence]) -> None:
    """Let rows of a linear layer whose input is zero depend on the heads of its bias.

    No gradient reaches such rows, as those of the values in the first layer of DETR's decoder.
    """
    for name in dependence:
        parent, _, kind = name.rpartition(".")
        module = model.get_submodule(parent)
        bias = dependence.get(f"{parent}.bias", {})
        if kind != "weight" or not is_linear(module) or not bias:
            continue
        if not any(uses.any() for uses in dependence[name].values()):
            columns = -2 if is_transposed(module) else -1
            shape = (-1, *module.get_parameter("weight").shape)
            dependence[name] = {
                part: uses.unsqueeze(columns).expand(shape) for part, uses in bias.items()
            }


def _map_of(name: str, axis: int, dependence: Dependence) -> OwnershipMap | None:
    """The ownership map of an axis; None if no head owns an index, or several heads share one."""
    owners = [_owners(part, uses.movedim(axis + 1, 1)) for part, uses in dependence.items()]
    # One weight may hold several parts, as a fused projection of queries, keys and values does.
    # Each part names the owners of its own indices, and the others are -1 there: hence the maximum.
    decided = [pair for pair in owners if pair is not None]
    if not decided or len(decided) < len(owners):
        return None
    heads = torch.stack([pair[0] for pair in decided]).amax(0)
    kv_heads = torch.stack([pair[1] for pair in decided]).amax(0)
    doubly = (heads != NO_HEAD) & (kv_heads != NO_HEAD)
    if (heads != kv_heads)[doubly].any() or (heads + kv_heads == 2 * NO_HEAD).all():
        return None
    return OwnershipMap(name, axis, heads, kv_heads.masked_fill(doubly, NO_HEAD))


def _owners(part: str, uses: Bool[Tensor, "H n *_"]) -> tuple[Tensor, Tensor] | None:
    """The query head and the kv head that own each index; None if several heads share one.

    A head owns an index that it alone uses, and a kv head one that the group of its query heads
    uses. No head owns an index that all heads use.
    """
    # Query head h reads kv head h // group: so the users of an index that belongs to a kv head are
    # neighbors, and the first of them is a multiple of their number. Any other set of users mixes
    # heads, unless it is all of them. With groups of one, the part alone tells both apart.
    users = (uses.flatten(2).any(2) if uses.ndim > 2 else uses).cpu()  # H n
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
    heads = torch.where(owned & ~of_kv, first, NO_HEAD)
    return heads, torch.where(of_kv, first // used, NO_HEAD)


def _with_biases(model: nn.Module, maps: list[OwnershipMap]) -> list[OwnershipMap]:
    """These maps, and maps of biases and statistics that belong to rows or channels of a weight.

    A bias of keys changes no output, because it shifts all logits of a query equally, so
    gradients do not always show its owner; the statistics of a batch norm have no gradients.
    """
    by_axis = {(owners.name, owners.axis): owners for owners in maps}
    for owners in maps:
        parent, _, kind = owners.name.rpartition(".")
        module = model.get_submodule(parent)
        out_axis = 1 if is_transposed(module) else 0
        is_rows = kind == "weight" and is_linear(module) and owners.axis == out_axis
        follow = ["bias"] if is_rows else []
        if kind == "weight" and is_batch_norm(module):
            follow = ["bias", "running_mean", "running_var"]
        for name in follow:
            if getattr(module, name, None) is not None:
                by_axis[f"{parent}.{name}", 0] = replace(owners, name=f"{parent}.{name}", axis=0)
    return [*by_axis.values()]


@dataclass(frozen=True)
class KeptHeads:
    """The query heads that stay in one attention, and the kv heads that they read.

    A kv head is listed several times if each of its queries gets a copy of its own.
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def counts(self) -> HeadCounts:
        return HeadCounts(len(self.heads), len(self.kv_heads))


def keep_heads(
    attention: Attention, maps: Sequence[OwnershipMap], heads: tuple[int, ...], expand: bool
) -> KeptHeads:
    """Keep these query heads, and the kv heads that they read."""
    counts = count_heads(attention, maps)
    group = counts.heads // counts.kv_heads
    read = [head // group for head in heads]
    kept = sorted(set(read))
    sizes = {kv: read.count(kv) for kv in kept}
    if len(set(sizes.values())) == 1:
        return KeptHeads(heads, tuple(kept))
    if not expand:
        listed = ", ".join(f"{size} of kv head {kv}" for kv, size in sizes.items())
        raise UnsupportedError(
            f"prune: {attention.site} would keep {listed}, and groups must be equal. Remove "
            f"as many heads of each group or whole groups, or give each query its own keys and "
            f"values with expand=True."
        )
    return KeptHeads(heads, tuple(read))


def kept_indices(owners: OwnershipMap, old: HeadCounts, kept: KeptHeads) -> Int[Tensor, " m"]:
    """The indices of a weight that stay, in their new order."""
    heads, kv_heads = owners.heads, owners.kv_heads
    stays = (heads < 0) | torch.isin(heads, torch.tensor(kept.heads))
    stays &= (kv_heads < 0) | torch.isin(kv_heads, torch.tensor(kept.kv_heads))
    if len(set(kept.kv_heads)) == len(kept.kv_heads) or not (kv_heads >= 0).any():
        return stays.nonzero().flatten()
    # Copies of a kv head stand beside each other within the keys and within the values, not across
    # both. A section ends where the numbers of kv heads start again or indices without one begin.
    indices = torch.arange(len(heads))
    starts = (kv_heads.diff(prepend=kv_heads[:1]) < 0) | ((kv_heads >= 0) & (kv_heads.roll(1) < 0))
    cuts = starts.nonzero().flatten()[starts[0].long() :].tolist()
    sections = torch.tensor_split(indices, cuts)
    return torch.cat([_section(owners, section, old, kept, stays) for section in sections])


def spread(weight: Tensor, owners: OwnershipMap, indices: Int[Tensor, " m"]) -> Tensor:
    """A weight at its old size: its entries at the kept indices, zeros at the others."""
    shape = list(weight.shape)
    shape[owners.axis] = len(owners.heads)
    zeros = weight.new_zeros(shape)
    return zeros.index_copy(owners.axis, indices.to(weight.device), weight)


def _section(
    owners: OwnershipMap,
    indices: Int[Tensor, " n"],
    old: HeadCounts,
    kept: KeptHeads,
    stays: Tensor,
) -> Int[Tensor, " m"]:
    """The kept indices of one run of consecutive kv heads, repeated where a kv head is."""
    kv_heads = owners.kv_heads[indices]
    if (kv_heads < 0).all():
        return indices[stays[indices]]
    if len(set(kv_heads.tolist())) < old.kv_heads:
        raise UnsupportedError(
            f"prune: queries, keys and values are interleaved in {owners.name}, which leaves no "
            f"place for further keys and values. Remove as many heads of each group."
        )
    return torch.cat([indices[kv_heads == kv] for kv in kept.kv_heads])
