"""The grouping of one attention's heads: what they share, and what queries and outputs absorb."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.ownership import Attention, OutputProjection, OwnershipMap
from headwise.surgery.grouping._fit import Features, Fit, cluster, fit
from headwise.surgery.grouping._rows import HeadRows, Layout
from headwise.surgery.grouping._symmetries import Symmetries


@dataclass(frozen=True)
class GroupedLayer:
    """How the heads of one attention were grouped to share keys and values.

    Attributes:
        name: The qualified name of its module.
        groups: The kv heads of each group, by their numbers before grouping.
        keys: Which features of keys were mixed or rotated to fit each other; "averaged" where
            none were.
        values: The same for values.
        keys_lost: The share of the keys' contribution to the logits that is lost, 0 … 1; above 1
            where averaged heads cancel each other.
        values_lost: The same for the values' contribution to the output.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    keys: str
    values: str
    keys_lost: float
    values_lost: float

    def __str__(self) -> str:
        groups = " ".join("+".join(map(str, group)) for group in self.groups)
        return (
            f"{self.name}: kv heads {groups}; keys {self.keys}, {self.keys_lost:.1%} lost; "
            f"values {self.values}, {self.values_lost:.1%} lost"
        )


@dataclass(frozen=True, eq=False)
class UngroupedLayer:
    """An attention before grouping, and the symmetries of its keys and values.

    Attributes:
        layout: The rows that produce its queries, keys and values.
        ownership: Which head owns each index of the weights around it.
    """

    attention: Attention
    layout: Layout
    keys: Symmetries
    values: Symmetries
    ownership: Sequence[OwnershipMap]

    @property
    def group_size(self) -> int:
        """The number of query heads that read one kv head."""
        return self.attention.site.n_heads // self.layout.n_kv_heads


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of an attention's heads, and what each group shares."""

    layer: UngroupedLayer
    groups: list[list[int]]
    keys: list[Fit]
    values: list[Fit]

    @classmethod
    def fitted(
        cls, model: nn.Module, layer: UngroupedLayer, n_groups: int, factors: Mapping[str, Tensor]
    ) -> "Grouping":
        """Groups of heads that lose little by sharing, found by clustering."""
        keys, values = _keys_of(model, layer, factors), _values_of(model, layer, factors)
        distances = _distances(keys, layer.keys) + _distances(values, layer.values)
        groups = cluster(distances, n_groups)
        key_fits = [fit(keys.subset(group), layer.keys) for group in groups]
        value_fits = [fit(values.subset(group), layer.values) for group in groups]
        return cls(layer, groups, key_fits, value_fits)

    @property
    def order(self) -> list[int]:
        """The order of the query heads after grouping."""
        n = self.layer.group_size
        return [kv * n + i for group in self.groups for kv in group for i in range(n)]

    def summary(self) -> GroupedLayer:
        lost = [
            sum(group.loss for group in fits) / (sum(group.total for group in fits) or 1.0)
            for fits in (self.keys, self.values)
        ]
        return GroupedLayer(
            self.layer.attention.site.name,
            tuple(map(tuple, self.groups)),
            str(self.layer.keys),
            str(self.layer.values),
            *lost,
        )

    def write_repeated(self, model: nn.Module, wide: nn.Module) -> None:
        """Write the shared keys and values into a model of the old shape, repeated per head."""
        layout = self.layer.layout
        for head_rows, fits in ((layout.k, self.keys), (layout.v, self.values)):
            rows = head_rows.read(model)
            for group, group_fit in zip(self.groups, fits, strict=True):
                rows[group] = group_fit.decoders @ group_fit.shared(rows[group])
            head_rows.write(wide, rows)

    @torch.no_grad()
    def write_grouped(self, model: nn.Module, small: nn.Module, layout: Layout) -> None:
        """Write what is shared into a model of the new shape, with its query heads reordered."""
        layer, n, order = self.layer, self.layer.group_size, self.order
        for old, new, fits in (
            (layer.layout.k, layout.k, self.keys),
            (layer.layout.v, layout.v, self.values),
        ):
            rows = old.read(model)
            shared = [fit.shared(rows[group]) for group, fit in zip(self.groups, fits, strict=True)]
            new.write(small, torch.stack(shared))
        queries, outputs = (
            torch.cat([group.decoders for group in fits]).repeat_interleave(n, 0).mT
            for fits in (self.keys, self.values)
        )
        layout.q.write(small, queries @ layer.layout.q.read(model)[order])
        output = layer.attention.output
        new_output = OutputProjection(output.name, small.get_submodule(output.name), output.n_heads)
        absorbed = outputs @ output.per_head.detach().double()[order]
        new_output.per_head.copy_(absorbed.to(new_output.weight))
        for owner in _per_head_weights(layer):
            weight = model.get_parameter(owner.name)
            heads = owner.heads.to(weight.device)
            indices = [(heads == head).nonzero().flatten() for head in range(len(order))]
            moved = weight.index_select(owner.axis, torch.cat([indices[head] for head in order]))
            small.get_parameter(owner.name).index_copy_(owner.axis, torch.cat(indices), moved)


def _per_head_weights(layer: UngroupedLayer) -> list[OwnershipMap]:
    """Weights per query head other than the projections, such as sinks.

    Raises:
        UnsupportedError: some are per kv head.
    """
    layout = layer.layout
    projections = {layout.q.name, layout.k.name, layout.v.name, layer.attention.output.name}
    weights = [w for w in layer.ownership if w.name.rpartition(".")[0] not in projections]
    for weight in weights:
        if (weight.kv_heads >= 0).any():
            raise UnsupportedError(
                f"group_heads: {weight.name} holds numbers for each of {layout.n_kv_heads} kv "
                f"heads, which cannot be shared. Leave its heads as they are."
            )
    return weights


def _keys_of(model: nn.Module, layer: UngroupedLayer, factors: Mapping[str, Tensor]) -> Features:
    layout, symmetries = layer.layout, layer.keys
    q = _weighted_rows(layout.q, model, factors)
    moments = _sum_by_kv_head(q @ q.mT, layer)
    # Positions rotate each pair of the other features at its own speed, so on average a pair has
    # one weight, and no correlation with other pairs.
    metric = torch.diag_embed(moments.diagonal(dim1=1, dim2=2))
    block = (..., symmetries.free[:, None], symmetries.free)
    metric[block] = moments[block]
    i, j = symmetries.pairs.T
    metric[:, i, i] = metric[:, j, j] = (metric[:, i, i] + metric[:, j, j]) / 2
    return Features.of(_weighted_rows(layout.k, model, factors), metric)


def _values_of(model: nn.Module, layer: UngroupedLayer, factors: Mapping[str, Tensor]) -> Features:
    output = layer.attention.output.per_head.detach().double()
    metric = _sum_by_kv_head(output @ output.mT, layer)
    return Features.of(_weighted_rows(layer.layout.v, model, factors), metric)


def _sum_by_kv_head(
    per_head: Float[Tensor, "H D D"], layer: UngroupedLayer
) -> Float[Tensor, "n D D"]:
    return per_head.view(-1, layer.group_size, *per_head.shape[1:]).sum(1)


def _weighted_rows(
    rows: HeadRows, model: nn.Module, factors: Mapping[str, Tensor]
) -> Float[Tensor, "n D in_and_bias"]:
    """Rows whose products are the mean products of the features that they produce."""
    factor = factors.get(rows.name)
    return rows.read(model) if factor is None else rows.read(model) @ factor


def _distances(features: Features, symmetries: Symmetries) -> Float64[np.ndarray, "n n"]:
    """What every two heads lose by sharing features, as a share of the size of all features."""
    n = len(features.metric)
    losses, total = np.zeros((n, n)), 0.0
    for i, j in combinations(range(n), 2):
        pair = fit(features.subset([i, j]), symmetries)
        losses[i, j] = losses[j, i] = pair.loss
        total += pair.total / (n - 1)  # each head is in n - 1 pairs
    return losses / (total or 1.0)
