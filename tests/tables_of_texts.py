"""Tables with sums per text, made without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from headwise.tables import Head, HeadTable, TextSums, Totals
from studies import make_heads

STATISTICS = ("entropy", "first", "previous")


def make_table(
    texts: int = 40,
    layers: int = 3,
    heads: int = 4,
    *,
    seed: int = 0,
    shifts: Mapping[str, Mapping[Head, float]] | None = None,
    statistics: Sequence[str] = STATISTICS,
) -> HeadTable:
    """A table of texts of various lengths: equal seeds give equal texts.

    Args:
        shifts: By statistic, how far the mean of a head is moved, in every text.
    """
    rows = make_heads(layers, heads)
    rng = np.random.default_rng(seed)
    counts = np.repeat(rng.integers(5, 30, (texts, 1)).astype(float), len(rows), axis=1)
    totals = {}
    for number, name in enumerate(statistics):
        # The heads are the same whatever the texts, and texts have something in common.
        means = np.random.default_rng(number).uniform(0.2, 0.6, len(rows))
        shared = 0.05 * rng.standard_normal((texts, 1))
        each = means + shared + 0.1 * rng.standard_t(4, counts.shape)
        for head, shift in (shifts or {}).get(name, {}).items():
            each[:, rows.index(head)] += shift
        totals[name] = Totals.of_texts(each * counts, counts, each.max(0), keep=True)
    versions = {"headwise": "0.1.0"}
    return HeadTable(rows, np.arange(len(rows)), totals, model=f"seed {seed}", versions=versions)


def with_heads(table: HeadTable, kept: Sequence[Head]) -> HeadTable:
    """The table of a pruned model: some heads, numbered anew, with their original addresses."""
    rows = [table.heads.index(head) for head in kept]
    numbers: dict[int, int] = {}
    heads = []
    for head in kept:
        numbers[head.layer] = numbers.get(head.layer, -1) + 1
        heads.append(Head(head.stack, head.layer, numbers[head.layer]))
    totals = {name: sums.select(lambda column: column[rows]) for name, sums in table.totals.items()}
    return replace(
        table,
        heads=tuple(heads),
        kv_heads=table.kv_heads[rows],
        totals=totals,
        original=tuple(kept),
        model="pruned",
    )


def of_texts(table: HeadTable, rows: np.ndarray) -> HeadTable:
    """The table of some of the texts."""
    totals = {}
    for name, sums in table.totals.items():
        parts = TextSums(*(part[rows] for part in table.per_text(name).parts))
        totals[name] = Totals.of_texts(parts.total, parts.count, sums.maximum, keep=True)
    return replace(table, totals=totals)
