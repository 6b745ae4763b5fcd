"""Heads as a grid: a row for each layer, a column for each head, and marks of categories."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from string import ascii_uppercase

import numpy as np
from jaxtyping import Float64

from headwise.tables._heads import Head

# Okabe and Ito 2008: distinguishable with any color blindness. Rarer categories share gray.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
OTHERS = "#777777"
PALEST = 0.25


@dataclass(frozen=True)
class HeadGrid:
    """The place of each head in a grid of layers and heads."""

    heads: Sequence[Head]

    @cached_property
    def layers(self) -> list[tuple[str, int]]:
        """The stack and the layer of each row, in the order of the heads."""
        return list(dict.fromkeys((head.stack, head.layer) for head in self.heads))

    @cached_property
    def width(self) -> int:
        return 1 + max(head.head for head in self.heads)

    @cached_property
    def names(self) -> list[str]:
        """The name of each row: the layer, and the stack if there are several."""
        several = len({stack for stack, _ in self.layers}) > 1
        return [f"{stack} {layer}" if several else str(layer) for stack, layer in self.layers]

    def place(self, head: Head) -> tuple[int, int]:
        """The row and the column of a head."""
        return self.layers.index((head.stack, head.layer)), head.head

    def image(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, "layers width"]:
        """The values of all heads as a grid; NaN where there is no head."""
        grid = np.full((len(self.layers), self.width), np.nan)
        rows, columns = zip(*map(self.place, self.heads), strict=True)
        grid[list(rows), list(columns)] = values
        return grid


def category_marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A hue (`#rrggbb`) and a letter for each category, the most frequent first.

    The hues are distinguishable with any color blindness; categories after the seventh share gray,
    and those after the twenty-sixth a dot.
    """
    marks = zip(chain(HUES, repeat(OTHERS)), chain(ascii_uppercase, repeat("·")), strict=False)
    return dict(zip(names, marks, strict=False))


def category_styles(
    categories: Mapping[Head, tuple[str, float]],
) -> dict[str, tuple[int, str, str]]:
    """The number of heads, the letter and the hue of each category, the most frequent first."""
    counts = Counter(category for category, _ in categories.values()).most_common()
    marks = category_marks([name for name, _ in counts])
    return {name: (count, marks[name][1], marks[name][0]) for name, count in counts}


def opacity(strength: float) -> float:
    """The opacity of a hue: paler where a strength, 0 to 1, is smaller, and none at 0."""
    return PALEST + (1 - PALEST) * min(strength, 1.0) if strength > 0 else 0.0
