"""What to find out about each head."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headwise.errors import ArgumentError
from headwise.table import STATISTICS

# From the token ids of one text, without padding, to pairs of positions (query, key).
Relation = Callable[[Sequence[int]], Iterable[tuple[int, int]]]


@dataclass(frozen=True)
class Request:
    """What to find out: statistics by name, and the mass on classes of tokens and on relations.

    A class is a set of token ids; its mass is what a query gives to all visible keys of the
    class. A relation is a function from the token ids of one text to pairs of positions
    (query, key); its mass is what a query gives to all its keys, over the queries that have
    one in sight.

    Cost, as a share of the two matrix products of attention: entropy and distance .12 each,
    everything else next to nothing.

    Attributes:
        statistics: Names out of `headwise.table.STATISTICS`.
        classes: Token ids by name.
        relations: Functions by name.
        maps: Whether to keep the queries and keys of the last batch, so that the watch can
            give the exact weights of a head. Memory grows with the text, not with its square.

    Raises:
        ArgumentError: an unknown statistic, or one name for two things.
    """

    statistics: tuple[str, ...] = tuple(STATISTICS)
    classes: Mapping[str, Collection[int]] = field(default_factory=dict)
    relations: Mapping[str, Relation] = field(default_factory=dict)
    maps: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.statistics if name not in STATISTICS]
        if unknown:
            raise ArgumentError(
                f"Request: no statistic {unknown[0]!r}. Choose from {', '.join(STATISTICS)}."
            )
        names = [*self.statistics, *self.classes, *self.relations]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"Request: {name!r} is asked for twice. Rename one of them.")
