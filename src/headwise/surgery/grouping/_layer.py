"""The heads of one attention, grouped: what they share, and what queries and outputs take on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import Attention, OutputProjection, OwnershipMap
from headwise.surgery.grouping._cluster import cluster, neighbors
from headwise.surgery.grouping._fit import Features, Fit, fit
from headwise.surgery.grouping._rows import Layout, Rows
from headwise.surgery.grouping._symmetries import Symmetries, none_free


@dataclass(frozen=True)
class GroupedLayer:
    """How the heads of one attention came to share keys and values.

    Attributes:
        name: The qualified name of its module.
        groups: The kv heads that came together, as they were numbered before.
        keys: What was mixed or turned so that keys fit each other; "averaged" is nothing.
        values: The same of values.
        keys_lost: The share of what keys give to the logits that is lost, 0 … 1; above 1 where
            heads are averaged that cancel each other.
        values_lost: The same of what values give to the output.
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
class Source:
    """An attention as it is, and how its heads may be changed without changing its answer.

    Attributes:
        layout: Where its queries, keys and values come from.
        shares: Whose the indices of all weights around it are.
    """

    attention: Attention
    layout: Layout
    keys: Symmetries
    values: Symmetries
    shares: Sequence[OwnershipMap]

    @property
    def group(self) -> int:
        """How many query heads read one kv head."""
        return self.attention.site.n_heads // self.layout.n_kv_heads


@dataclass(frozen=True, eq=False)
class Grouped:
    """What the heads of an attention are to share, group by group."""

    source: Source
    groups: list[list[int]]
    keys: list[Fit]
    values: list[Fit]

    @classmethod
    def fitted(
        cls, model: nn.Module, source: Source, n_groups: int, roots: Mapping[str, Tensor]
    ) -> "Grouped":
        """The groups of heads that lose least by sharing, or nearly so."""
        keys, values = _keys_of(model, source, roots), _values_of(model, source, roots)
        groups = cluster(_apart(keys, source.keys) + _apart(values, source.values), n_groups)
        return cls._of(source, groups, keys, values)

    @classmethod
    def pooled(cls, model: nn.Module, source: Source, n_groups: int) -> "Grouped":
        """Neighbors, which share their mean."""
        groups = neighbors(source.layout.n_kv_heads, n_groups)
        plain = replace(source, keys=none_free(), values=none_free())
        return cls._of(plain, groups, _keys_of(model, plain, {}), _values_of(model, plain, {}))

    @classmethod
    def _of(
        cls, source: Source, groups: list[list[int]], keys: Features, values: Features
    ) -> "Grouped":
        fits = [fit(keys.some(group), source.keys) for group in groups]
        return cls(
            source, groups, fits, [fit(values.some(group), source.values) for group in groups]
        )

    @property
    def order(self) -> list[int]:
        """The query heads in the order in which they stand when kv heads are grouped."""
        n = self.source.group
        return [kv * n + at for group in self.groups for kv in group for at in range(n)]

    def told(self) -> GroupedLayer:
        lost = [
            sum(one.lost for one in fits) / (sum(one.whole for one in fits) or 1.0)
            for fits in (self.keys, self.values)
        ]
        return GroupedLayer(
            self.source.attention.site.name,
            tuple(map(tuple, self.groups)),
            str(self.source.keys),
            str(self.source.values),
            *lost,
        )

    def expand(self, model: nn.Module, wide: nn.Module) -> None:
        """Give each head of a model of the old shape its own copy of what its group shares."""
        layout = self.source.layout
        for rows, fits in ((layout.k, self.keys), (layout.v, self.values)):
            own = rows.read(model)
            for group, one in zip(self.groups, fits, strict=True):
                own[group] = one.mixed @ one.shared(own[group])
            rows.write(wide, own)

    @torch.no_grad()
    def settle(self, model: nn.Module, small: nn.Module, layout: Layout) -> None:
        """Write what is shared into a model of the new shape, its query heads in a new order."""
        source, n, order = self.source, self.source.group, self.order
        for old, new, fits in (
            (source.layout.k, layout.k, self.keys),
            (source.layout.v, layout.v, self.values),
        ):
            rows = old.read(model)
            pairs = zip(self.groups, fits, strict=True)
            new.write(small, torch.stack([one.shared(rows[group]) for group, one in pairs]))
        queries, outputs = (
            torch.cat([one.mixed for one in fits]).repeat_interleave(n, 0).mT
            for fits in (self.keys, self.values)
        )
        layout.q.write(small, queries @ source.layout.q.read(model)[order])
        output = source.attention.output
        there = OutputProjection(output.name, small.get_submodule(output.name), output.n_heads)
        mixed = outputs @ output.per_head.detach().double()[order]
        there.per_head.copy_(mixed.to(there.weight))
        for one in _others(source):
            weight = model.get_parameter(one.name)
            heads = one.heads.to(weight.device)
            own = [(heads == head).nonzero().flatten() for head in range(len(order))]
            moved = weight.index_select(one.axis, torch.cat([own[head] for head in order]))
            small.get_parameter(one.name).index_copy_(one.axis, torch.cat(own), moved)


def _others(source: Source) -> list[OwnershipMap]:
    """Weights with numbers for each head that make no queries, keys or values, such as sinks.

    Raises:
        UnsupportedError: some are for each kv head.
    """
    layout = source.layout
    known = {layout.q.name, layout.k.name, layout.v.name, source.attention.output.name}
    others = [one for one in source.shares if one.name.rpartition(".")[0] not in known]
    for one in others:
        if (one.kv_heads >= 0).any():
            raise UnsupportedError(
                f"group_heads: {one.name} holds numbers for each of {layout.n_kv_heads} kv heads, "
                f"which cannot be shared. Leave its heads as they are."
            )
    return others


def _keys_of(model: nn.Module, source: Source, roots: Mapping[str, Tensor]) -> Features:
    layout, freedom = source.layout, source.keys
    q = _seen(layout.q, model, roots)
    counts = _by_kv_head(q @ q.mT, source)
    # Positions turn the other features apart, so that on the whole each pair counts by itself.
    kept = torch.diag_embed(counts.diagonal(dim1=1, dim2=2))
    block = (..., freedom.free[:, None], freedom.free)
    kept[block] = counts[block]
    one, two = freedom.pairs.T
    kept[:, one, one] = kept[:, two, two] = (kept[:, one, one] + kept[:, two, two]) / 2
    return Features.of(_seen(layout.k, model, roots), kept)


def _values_of(model: nn.Module, source: Source, roots: Mapping[str, Tensor]) -> Features:
    out = source.attention.output.per_head.detach().double()
    return Features.of(_seen(source.layout.v, model, roots), _by_kv_head(out @ out.mT, source))


def _by_kv_head(of_heads: Float[Tensor, "H D D"], source: Source) -> Float[Tensor, "n D D"]:
    return of_heads.view(-1, source.group, *of_heads.shape[1:]).sum(1)


def _seen(
    rows: Rows, model: nn.Module, roots: Mapping[str, Tensor]
) -> Float[Tensor, "n D in_and_bias"]:
    """Rows whose products are the mean products of what they make."""
    root = roots.get(rows.name)
    return rows.read(model) if root is None else rows.read(model) @ root


def _apart(features: Features, freedom: Symmetries) -> Float64[np.ndarray, "n n"]:
    """What each two heads lose by sharing, as a share of what all have."""
    n = len(features.counts)
    lost, whole = np.zeros((n, n)), 0.0
    for one, two in combinations(range(n), 2):
        shared = fit(features.some([one, two]), freedom)
        lost[one, two] = lost[two, one] = shared.lost
        whole += shared.whole / (n - 1)  # each head is one of n - 1 pairs
    return lost / (whole or 1.0)
