"""What to find out about each head."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.errors import ArgumentError
from headwise.tables import STATISTICS

# From the token ids of one text, without padding, to pairs of positions (query, key).
Relation = Callable[[Sequence[int]], Iterable[tuple[int, int]]]

_OF_MASS = re.compile(r"(top|value)\((.*)\)")
OFFSETS = ("first", "self", "previous", "next")
DEFAULT = (
    "entropy", "max_weight", *OFFSETS, "distance", "max_logit", "lse", "sink",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What to find out: statistics by name, and the mass on classes of tokens and on relations.

    A class is a set of token ids; its mass is what a query gives to all visible keys of the
    class. A relation is a function from the token ids of one text to pairs of positions
    (query, key); its mass is what a query gives to all its keys, over the queries that have
    one in sight. Where pairs do not follow from the tokens (a parse, say), name them in `pairs`
    and give them with `watch.pairs(name=...)` before each forward pass. Both are of one text:
    in attention to another text they are NaN.

    Each mass has two more statistics, on request. `top(first)` is the share of queries whose
    largest weight is on the first token (ties share it). `value(first)` is the mass with each
    key weighted by the size of what it would write, `‖v_j W_O‖`: where a head attends to keys
    with small values, it attends much and does little. Neither that nor `output_norm` knows of a
    gate that a model puts between its heads and their output projection.

    A mean is over the queries that are eligible: a mass counts those that may attend to such a
    key (the first query has no `previous`, a query before the first comma no comma), and a query
    with one visible key, whose weights are 1 by necessity, counts for logits alone. So a mass on
    a rare class may be far above the mean over all queries: `queries="all"` gives that, where a
    query without such a key counts as 0 and one with a single visible key as it is. Tables of
    both kinds do not add.

    Cost, as a share of the two matrix products of attention: entropy and distance .12 each,
    participation .05, received .05, `top` and `value` .1 each for all masses together, and
    everything else next to nothing. `output_norm` and `value` need a product of each head (or
    value) with a matrix of its own size. A relation is called once for each text.

    Attributes:
        statistics: Names out of `headwise.tables.STATISTICS`. By default all but participation
            and output_norm.
        classes: Token ids by name.
        relations: Functions by name.
        pairs: Names of pairs that are given for each forward pass.
        top: Masses whose `top(...)` is wanted: `first`, `self`, `previous`, `next`, or the name
            of a class, a relation or pairs.
        value: Masses whose `value(...)` is wanted.
        queries: "eligible", or "all" for means over every query that attends to some key.
        per_text: Whether to keep the sums of each text, from which intervals are drawn. Memory:
            24 bytes for each text, head and statistic.
        received: Whether to sum up what each key of the latest texts received.
        maps: Whether to keep the queries and keys of the last batch, so that the watch can
            give the exact weights of a head. Memory grows with the text, not with its square.

    Raises:
        ArgumentError: an unknown statistic or mass, or one name for two things.
    """

    statistics: tuple[str, ...] = DEFAULT
    classes: Mapping[str, Collection[int]] = field(default_factory=dict)
    relations: Mapping[str, Relation] = field(default_factory=dict)
    pairs: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    queries: str = "eligible"
    per_text: bool = False
    received: bool = False
    maps: bool = False

    def __post_init__(self) -> None:
        _check_kinds(self)
        if self.queries not in ("eligible", "all"):
            raise ArgumentError(
                f"Request: queries={self.queries!r}. Give 'eligible' or 'all', for means over the "
                f"queries that may attend to such a key, or over all."
            )
        unknown = [name for name in self.statistics if name not in STATISTICS]
        if unknown:
            raise ArgumentError(
                f"Request: no statistic {unknown[0]!r}. Choose from {', '.join(STATISTICS)}."
            )
        named = [*self.statistics, *self.classes, *self.relations, *self.pairs]
        for name in named:
            if named.count(name) > 1:
                raise ArgumentError(f"Request: {name!r} is asked for twice. Rename one of them.")
        masses = (*OFFSETS, *self.classes, *self.relations, *self.pairs)
        for measure, of in (("top", self.top), ("value", self.value)):
            for name in of:
                if name not in masses or of.count(name) > 1:
                    raise ArgumentError(
                        f"Request: {measure} of {name!r} is asked for twice, or is of no mass. "
                        f"Choose from {', '.join(masses)}, each once."
                    )

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        per_text: bool = False,
        classes: Mapping[str, Collection[int]] | None = None,
    ) -> "Request":
        """The statistics and nothing else, by the names that a table gives them.

        Args:
            classes: Token ids by name; those are asked for whose name, `top(...)` or `value(...)`
                is among the names.
        Raises:
            ArgumentError: an unknown name.
        """
        asked: dict[str, list[str]] = {"": [], "top": [], "value": []}
        for name in names:
            found = _OF_MASS.fullmatch(name)
            asked[found[1] if found else ""].append(found[2] if found else name)
        named = {name for some in asked.values() for name in some}
        known = {name: ids for name, ids in (classes or {}).items() if name in named}
        statistics = tuple(name for name in asked[""] if name not in known)
        top, value = tuple(asked["top"]), tuple(asked["value"])
        return cls(statistics, classes=known, top=top, value=value, per_text=per_text)

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics that a table will have, in their order."""
        masses = (*self.classes, *self.relations, *self.pairs)
        tops = (f"top({name})" for name in self.top)
        return (*self.statistics, *masses, *tops, *(f"value({name})" for name in self.value))

    @property
    def needs_projection(self) -> bool:
        """Whether the output projection of each site has to be known."""
        return bool(self.value) or "output_norm" in self.statistics

    def wants(self, mass: str) -> bool:
        """Whether anything about a mass is asked for."""
        return mass in self.names or mass in self.top or mass in self.value


def _check_kinds(request: Any) -> None:
    """Refuse what is easily given in place of a tuple of names, of token ids, or of functions."""
    for field_name in ("statistics", "pairs", "top", "value"):
        names = getattr(request, field_name)
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"Request: {field_name}={names!r}. Give a tuple of names.")
    for name, tokens in request.classes.items():
        if isinstance(tokens, str) or not isinstance(tokens, Collection):
            raise ArgumentError(
                f"Request: the class {name!r} is {tokens!r}. Give the ids of its tokens."
            )
    for name, relation in request.relations.items():
        if not callable(relation):
            raise ArgumentError(f"Request: the relation {name!r} is {relation!r}. Give a function.")
