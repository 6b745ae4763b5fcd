"""Which heads of two models are the same head, by their addresses in the original model."""

from collections.abc import Sequence
from dataclasses import dataclass

from headwise.errors import HeadError
from headwise.tables import Head, HeadTable


@dataclass(frozen=True)
class MatchedHeads:
    """The heads of two models by their original addresses.

    Attributes:
        heads: All addresses, in the order of the model before, then those only after.
        before: For each address its row in the table before; None if it is not there.
        after: The same for the table after.
    """

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
    if not before.original and not after.original:
        _check_layers(before.heads, after.heads)
    rows_before, rows_after = _rows(before), _rows(after)
    if not rows_before.keys() & rows_after.keys():
        raise HeadError(
            f"compare: {min(before.heads)} to {max(before.heads)} and {min(after.heads)} to "
            f"{max(after.heads)} have no head in common. Compare models of one architecture."
        )
    if before.original or after.original:
        _check_layers_exist(rows_before, rows_after)
    heads = tuple(dict.fromkeys([*rows_before, *sorted(rows_after)]))
    return MatchedHeads(
        heads, tuple(map(rows_before.get, heads)), tuple(map(rows_after.get, heads))
    )


def _rows(table: HeadTable) -> dict[Head, int]:
    originals = table.original or table.heads
    return {head: row for row, head in enumerate(originals) if head is not None}


def _check_layers(before: Sequence[Head], after: Sequence[Head]) -> None:
    """Refuse models whose heads cannot be the same: other layers, or other heads in a layer."""
    layers = [_heads_by_layer(heads) for heads in (before, after)]
    if layers[0].keys() != layers[1].keys():
        raise HeadError(
            f"compare: {_layers_of(layers[0])} before and {_layers_of(layers[1])} after. Compare "
            f"models with the same layers."
        )
    for layer, heads in layers[0].items():
        if heads != layers[1][layer]:
            raise HeadError(
                f"compare: {layer} has {len(heads)} heads before and {len(layers[1][layer])} "
                f"after, and neither model records which of the original heads it has. Compare "
                f"models that headwise pruned or grouped."
            )


def _check_layers_exist(before: dict[Head, int], after: dict[Head, int]) -> None:
    """Refuse a pruned model beside one with other layers: each layer keeps a head."""
    layers = [_heads_by_layer(list(rows)) for rows in (before, after)]
    if layers[0].keys() != layers[1].keys():
        raise HeadError(
            f"compare: {_layers_of(layers[0])} before and {_layers_of(layers[1])} after, by the "
            f"original numbers of their heads. Compare a model with one made from it."
        )


def _heads_by_layer(heads: Sequence[Head]) -> dict[str, set[int]]:
    layers: dict[str, set[int]] = {}
    for head in heads:
        name = f"{head.stack}.L{head.layer}" if head.stack else f"L{head.layer}"
        layers.setdefault(name, set()).add(head.head)
    return layers


def _layers_of(layers: dict[str, set[int]]) -> str:
    names = list(layers)
    return f"{len(names)} layers ({names[0]} to {names[-1]})" if len(names) > 1 else names[0]
