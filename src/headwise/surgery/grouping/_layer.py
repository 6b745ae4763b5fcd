"""The heads of one attention, grouped: what they share, and what queries and outputs take on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models import Attention, OutputProjection, Share
from headwise.surgery.grouping._cluster import cluster, neighbors
from headwise.surgery.grouping._freedom import Freedom, none_free
from headwise.surgery.grouping._rows import Layout
from headwise.surgery.grouping._shared import Made, Shared, share


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
    keys: Freedom
    values: Freedom
    shares: Sequence[Share]

    @property
    def group(self) -> int:
        """How many query heads read one kv head."""
        return self.attention.site.n_heads // self.layout.n_kv_heads


@dataclass(frozen=True, eq=False)
class Grouped:
    """What the heads of an attention are to share, group by group."""

    source: Source
    groups: list[list[int]]
    keys: list[Shared]
    values: list[Shared]

    @classmethod
    def of(
        cls, model: nn.Module, source: Source, n_groups: int, roots: Mapping[str, Tensor]
    ) -> "Grouped":
        """The groups of heads that lose least by sharing, or nearly so."""
        keys, values = _made_keys(model, source, roots), _made_values(model, source, roots)
        pairs = [(keys, source.keys), (values, source.values)]
        apart = _apart(keys, source.keys) + _apart(values, source.values)
        groups = cluster(apart, n_groups)
        shared = [[share(made.of(group), freedom) for group in groups] for made, freedom in pairs]
        return cls(source, groups, *shared)

    @classmethod
    def pooled(cls, model: nn.Module, source: Source, n_groups: int) -> "Grouped":
        """Neighbors, which share their mean."""
        made = _made_keys(model, source, {}), _made_values(model, source, {})
        groups = neighbors(source.layout.n_kv_heads, n_groups)
        shared = [[share(one.of(group), none_free()) for group in groups] for one in made]
        return cls(replace(source, keys=none_free(), values=none_free()), groups, *shared)

    def told(self) -> GroupedLayer:
        lost = [
            sum(one.lost for one in shared) / (sum(one.whole for one in shared) or 1.0)
            for shared in (self.keys, self.values)
        ]
        return GroupedLayer(
            self.source.attention.site.name,
            tuple(map(tuple, self.groups)),
            str(self.source.keys),
            str(self.source.values),
            *lost,
        )

    def expand(self, model: nn.Module) -> None:
        """Give each head of a model of the old shape its own copy of what its group shares."""
        for rows, parts in ((self.source.layout.k, self.keys), (self.source.layout.v, self.values)):
            own = torch.cat([part.mixed @ part.rows for part in parts])
            rows.write(model, own[np.argsort([head for group in self.groups for head in group])])

    @torch.no_grad()
    def settle(self, model: nn.Module, small: nn.Module, layout: Layout) -> None:
        """Write what is shared into a model of the new shape, its query heads in a new order."""
        source, n = self.source, self.source.group
        order = [kv * n + at for group in self.groups for kv in group for at in range(n)]
        mixed = [
            torch.cat([one.mixed for one in parts]).repeat_interleave(n, 0)
            for parts in (self.keys, self.values)
        ]
        layout.q.write(small, mixed[0].mT @ source.layout.q.read(model)[order])
        layout.k.write(small, torch.stack([one.rows for one in self.keys]))
        layout.v.write(small, torch.stack([one.rows for one in self.values]))
        output = source.attention.output
        out = mixed[1].mT @ output.per_head.detach().double()[order]
        there = small.get_submodule(output.name)
        OutputProjection(output.name, there, output.n_heads).per_head.copy_(out.to(output.weight))
        for one in _others(source):
            weight = small.get_parameter(one.name)
            at = torch.cat([(one.heads == head).nonzero().flatten() for head in order])
            to = torch.cat([(one.heads == head).nonzero().flatten() for head in range(len(order))])
            weight.index_copy_(
                one.axis, to, model.get_parameter(one.name).index_select(one.axis, at)
            )


def _others(source: Source) -> list[Share]:
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


def _made_keys(model: nn.Module, source: Source, roots: Mapping[str, Tensor]) -> Made:
    layout, freedom = source.layout, source.keys
    q = _seen(layout.q.read(model), roots.get(layout.q.name))
    counts = _by_kv_head(q @ q.mT, source)
    # Positions turn the other features apart, so that on the whole each pair counts by itself.
    kept = torch.diag_embed(counts.diagonal(dim1=1, dim2=2))
    block = slice(None), freedom.free[:, None], freedom.free
    kept[block] = counts[block]
    one, two = freedom.pairs.T
    both = (kept[:, one, one] + kept[:, two, two]) / 2
    kept[:, one, one] = kept[:, two, two] = both
    rows = layout.k.read(model)
    return Made(rows, _seen(rows, roots.get(layout.k.name)), kept)


def _made_values(model: nn.Module, source: Source, roots: Mapping[str, Tensor]) -> Made:
    out = source.attention.output.per_head.detach().double()
    counts = _by_kv_head(out @ out.mT, source)
    rows = source.layout.v.read(model)
    return Made(rows, _seen(rows, roots.get(source.layout.v.name)), counts)


def _by_kv_head(of_heads: Float[Tensor, "H D D"], source: Source) -> Float[Tensor, "n D D"]:
    return of_heads.view(-1, source.group, *of_heads.shape[1:]).sum(1)


def _seen(rows: Float[Tensor, "n D m"], root: Float[Tensor, "m m"] | None) -> Tensor:
    return rows if root is None else rows @ root


def _apart(made: Made, freedom: Freedom) -> Float64[np.ndarray, "n n"]:
    """What each two heads lose by sharing, as a share of what all have."""
    n = len(made.rows)
    lost = np.zeros((n, n))
    for one, two in combinations(range(n), 2):
        lost[one, two] = lost[two, one] = share(made.of([one, two]), freedom).lost
    whole = sum(share(made.of([head]), freedom).whole for head in range(n))
    return lost / (whole or 1.0)
