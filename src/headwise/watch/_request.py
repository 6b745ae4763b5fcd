"""Which statistics to compute for each head."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headwise._display import did_you_mean
from headwise.errors import ArgumentError
from headwise.tables import STATISTICS

# Maps the token ids of one text, without padding, to pairs of positions (query, key).
Relation = Callable[[Sequence[int]], Iterable[tuple[int, int]]]

_OF_MASS = re.compile(r"(top|value)\((.*)\)")
OFFSETS = ("first", "self", "previous", "next")
# Names that a span may not have, and what they mean.
_RESERVED = {
    "queries": "the queries of watch.spans",
    **dict.fromkeys(STATISTICS, "a statistic"),
    **dict.fromkeys(
        ("name", "stack", "layer", "head", "kv_head", "coverage", "original"), "a table's column"
    ),
}
DEFAULT = (
    "entropy", "max_weight", *OFFSETS, "distance", "max_logit", "lse", "sink",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Which statistics to compute, and the masses on classes of tokens and on relations.

    The *mass* of a set of keys is the sum of a query's weights over the set, from 0 to 1. A class
    is a set of token ids; its mass covers all visible keys of the class. A relation is a function
    from the token ids of one text to pairs of positions (query, key); its mass covers all keys of
    a query, over the queries that can see one. If pairs do not follow from the tokens (a parse,
    for example), name them in `pairs` and pass them to `watch.pairs(name=...)` before each
    forward pass. Relations and pairs hold within one text: in cross-attention they are NaN.
    Spans are named stretches of each text, such as a passage or an instruction, whose positions
    are passed to `watch.spans(name=...)`, with the queries that count if not all do.

    Each mass has two more statistics, on request. `top(first)` is the share of queries whose
    largest weight is on the first token (ties share it). `value(first)` is the mass with each
    key weighted by the norm of what it would write, `‖v_j W_O‖`: a head may attend mostly to keys
    whose values are small. `value(...)` and `output_norm` ignore any gate that a model puts
    between its heads and their output projection; `gate` is the mean of its factors, from 0 to 1,
    and NaN where a model has none.

    Means are over eligible queries. A mass counts queries that may attend to such a key (the
    first query has no `previous`, a query before the first comma has no comma). A query with a
    single visible key has a fixed weight of 1, so it counts only for logits. The mass on a rare
    class may therefore be far above its mean over all queries. `queries="all"` takes that mean:
    a query without such a key counts as 0, and one with a single visible key counts as it is.
    Tables of the two kinds do not add.

    `entropy` and `distance` cost the most, then `top`, `value`, `participation` and `received`;
    everything else is nearly free. `output_norm` and `value` multiply each head (or value) by a
    matrix of its own width. A relation is called once for each text.

    Attributes:
        statistics: Names from `headwise.tables.STATISTICS`. The default is all except
            participation, output_norm and gate.
        classes: Token ids by name.
        relations: Functions by name.
        pairs: Names of pairs that are passed for each forward pass.
        spans: Names of stretches that are passed for each batch of texts. `queries` and the names
            of a table's columns are reserved.
        top: Masses whose `top(...)` to compute: `first`, `self`, `previous`, `next`, or the name
            of a class, a relation, pairs or a span.
        value: Masses whose `value(...)` to compute.
        queries: "eligible", or "all" for means over every query that attends to some key.
        per_text: Whether to keep the sums of each text, which intervals need. Memory: 24 bytes
            for each text, head and statistic.
        received: Whether to sum the attention that each key of the latest texts received.
        per_query: Whether to keep the mass of each query of the latest texts on each span.
        maps: Whether to keep the queries and keys of the last batch, so that the watch can
            compute the exact weights of a head. Memory grows linearly with the text.

    Raises:
        ArgumentError: a statistic or mass is unknown, a name is used twice or reserved, or
            `per_query` is set without spans.
    """

    statistics: tuple[str, ...] = DEFAULT
    classes: Mapping[str, Collection[int]] = field(default_factory=dict)
    relations: Mapping[str, Relation] = field(default_factory=dict)
    pairs: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    top: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    queries: str = "eligible"
    per_text: bool = False
    received: bool = False
    per_query: bool = False
    maps: bool = False

    def __post_init__(self) -> None:
        _check_kinds(self)
        if self.queries not in ("eligible", "all"):
            raise ArgumentError(
                f"Request: queries={self.queries!r}. Give 'eligible' or 'all', for means over the "
                f"queries that may attend to such a key, or over all queries."
            )
        _check_known("", self.statistics, STATISTICS)
        for name in self.spans:
            if name in _RESERVED:
                raise ArgumentError(
                    f"Request: the span name {name!r} is reserved, for {_RESERVED[name]}. Rename "
                    f"the span."
                )
        if self.per_query and not self.spans:
            raise ArgumentError("Request: per_query=True without spans. Give spans=(...).")
        named = (*self.classes, *self.relations, *self.pairs, *self.spans)
        _check_once("", (*self.statistics, *named), "Rename one of them.")
        for measure, names in (("top of ", self.top), ("value of ", self.value)):
            _check_once(measure, names, "Leave one of them out.")
            _check_known(measure, names, (*OFFSETS, *named))

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        per_text: bool = False,
        classes: Mapping[str, Collection[int]] | None = None,
    ) -> "Request":
        """A request for exactly these statistics, by the names that a table gives them.

        Args:
            classes: Token ids by name; only classes that the names mention are used.
        Raises:
            ArgumentError: a name is unknown.
        """
        by_measure: dict[str, list[str]] = {"": [], "top": [], "value": []}
        for name in names:
            match = _OF_MASS.fullmatch(name)
            by_measure[match[1] if match else ""].append(match[2] if match else name)
        mentioned = {name for masses in by_measure.values() for name in masses}
        used = {name: ids for name, ids in (classes or {}).items() if name in mentioned}
        statistics = tuple(name for name in by_measure[""] if name not in used)
        _check_known("", statistics, (*STATISTICS, *(classes or {})))
        top, value = tuple(by_measure["top"]), tuple(by_measure["value"])
        for measure, masses in (("top of ", top), ("value of ", value)):
            _check_known(measure, masses, (*OFFSETS, *(classes or {})))
        return cls(statistics, classes=used, top=top, value=value, per_text=per_text)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all statistics of the table, in order."""
        masses = (*self.classes, *self.relations, *self.pairs, *self.spans)
        tops = (f"top({name})" for name in self.top)
        return (*self.statistics, *masses, *tops, *(f"value({name})" for name in self.value))

    @cached_property
    def needs_projection(self) -> bool:
        """Whether a statistic needs the output projection of each site, or its input."""
        return self.needs_weight or "gate" in self.statistics

    @property
    def needs_weight(self) -> bool:
        """Whether a statistic needs the weight of the output projection of each site."""
        return bool(self.value) or "output_norm" in self.statistics

    @cached_property
    def is_of_text(self) -> bool:
        """Whether a mass depends on the tokens of a text, or on what is said about it."""
        return bool(self.classes or self.relations or self.pairs or self.spans)


def _check_known(measure: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            problem = f"{measure}{name!r}, but no mass has that name"
            raise ArgumentError(
                f"Request: {problem if measure else f'no statistic {name!r}'}."
                f"{did_you_mean(name, known)} Choose from {', '.join(known)}."
            )


def _check_once(measure: str, names: Sequence[str], advice: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"Request: {measure}{name!r} is requested twice. {advice}")


def _check_kinds(request: Any) -> None:
    """Refuse arguments of the wrong type, such as a string in place of a tuple of names."""
    for field_name in ("statistics", "pairs", "spans", "top", "value"):
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
