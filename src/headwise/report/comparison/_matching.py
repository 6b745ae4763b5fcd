"""Which heads of two models are the same head, by their addresses in the original model."""

from collections.abc import Iterable
from typing import NamedTuple

from headwise.errors import HeadError
from headwise.tables import Head, HeadTable


class MatchedHeads(NamedTuple):
    """The original addresses of all heads, and the row of each in both tables; None: not there."""

    heads: tuple[Head, ...]
    before: tuple[int | None, ...]
    after: tuple[int | None, ...]

    @property
    def common(self) -> list[int]:
        """The numbers of the heads that both models have."""
        rows = enumerate(zip(self.before, self.after, strict=True))
        return [number for number, pair in rows if None not in pair]


def match_heads(before: HeadTable, after: HeadTable) -> MatchedHeads:
    """Match the heads of two tables; heads of zeros that pad a layer belong to neither.

    Raises:
        HeadError: the models have other layers, or other numbers of heads without a record of the
            original ones, or no head in common.
    """
    was, now = (
        {head: row for row, head in enumerate(table.original or table.heads) if head is not None}
        for table in (before, after)
    )
    recorded = bool(before.original or after.original)
    if recorded and not was.keys() & now.keys():
        raise HeadError(
            f"compare: {min(before.heads)} to {max(before.heads)} and {min(after.heads)} to "
            f"{max(after.heads)} have no head in common. Compare models of one architecture."
        )
    layers = [_heads_by_layer(rows) for rows in (was, now)]
    if layers[0].keys() != layers[1].keys():  # each layer keeps a head
        names = [_layers_of(list(each)) for each in layers]
        by, what = "", "models with the same layers"
        if recorded:
            by, what = ", by the original numbers of their heads", "a model with one made from it"
        raise HeadError(f"compare: {names[0]} before and {names[1]} after{by}. Compare {what}.")
    for layer, numbers in layers[0].items():
        if not recorded and numbers != layers[1][layer]:
            raise HeadError(
                f"compare: {layer} has {len(numbers)} heads before and {len(layers[1][layer])} "
                f"after, and neither model records which of the original heads it has. Compare "
                f"models that headwise pruned or grouped."
            )
    heads = tuple(dict.fromkeys([*was, *sorted(now)]))
    return MatchedHeads(heads, tuple(map(was.get, heads)), tuple(map(now.get, heads)))


def _heads_by_layer(heads: Iterable[Head]) -> dict[str, set[int]]:
    layers: dict[str, set[int]] = {}
    for head in heads:
        layers.setdefault(str(head).rpartition(".")[0], set()).add(head.head)
    return layers


def _layers_of(names: list[str]) -> str:
    return f"{len(names)} layers ({names[0]} to {names[-1]})" if len(names) > 1 else names[0]
