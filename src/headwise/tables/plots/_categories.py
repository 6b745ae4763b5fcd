"""Heads as a grid of categories, such as roles: a hue and a letter each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from string import ascii_uppercase
from typing import Any

from headwise._display import printable
from headwise.tables._heads import Head
from headwise.tables.plots._head_grid import HeadGrid

# Okabe and Ito 2008: distinguishable with any colour blindness. Rarer categories share grey.
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
OTHERS = "#777777"
PALEST = 0.25


def category_marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A hue (`#rrggbb`) and a letter for each category, the most frequent first.

    The hues are distinguishable with any colour blindness; categories after the seventh share grey,
    and those after the twenty-sixth a dot.
    """
    marks = zip(chain(HUES, repeat(OTHERS)), chain(ascii_uppercase, repeat("·")), strict=False)
    return dict(zip(names, marks, strict=False))


def opacity(strength: float) -> float:
    """The opacity of a hue: paler where a strength, 0 to 1, is smaller, and none at 0."""
    return PALEST + (1 - PALEST) * min(strength, 1.0) if strength > 0 else 0.0


def category_styles(
    categories: Mapping[Head, tuple[str, float]],
) -> dict[str, tuple[int, str, str]]:
    """The number of heads, the letter and the hue of each category, the most frequent first."""
    counts = Counter(category for category, _ in categories.values()).most_common()
    marks = category_marks([name for name, _ in counts])
    return {name: (count, marks[name][1], marks[name][0]) for name, count in counts}


def plot_categories(
    function: str,
    heads: Sequence[Head],
    categories: Mapping[Head, tuple[str, float]],
    ax: Any,
    signs: Mapping[Head, tuple[str, str]] | None = None,
) -> Any:
    """Draw the category of each head as a hue and a letter, and its strength as lightness.

    Args:
        categories: The category of the heads that have one, and its strength from 0 (the letter
            alone, without a hue) to 1.
        signs: A further sign of some heads, and its meaning.
    """
    signs = signs or {}
    grid = HeadGrid(heads)
    ax = grid.axes(function, ax)
    styles = category_styles(categories)
    for head in heads:
        row, column = grid.place(head)
        category, strength = categories.get(head, ("", 0.0))
        sign, _ = signs.get(head, ("", ""))
        _, letter, hue = styles.get(category, (0, "", "#ffffff"))
        alpha = opacity(strength)
        square = {"markersize": 13, "markeredgecolor": "0.7", "markeredgewidth": 0.5}
        ax.plot(column, row, "s", markerfacecolor=(hue, alpha), **square)
        ax.text(column, row, sign + letter, ha="center", va="center_baseline", fontsize="small")
    for name, (count, letter, hue) in styles.items():
        text = printable(f"{letter}  {name}, {count}")
        ax.plot([], [], "s", color=hue, label=text)
    for (sign, meaning), count in Counter(signs.values()).most_common():
        text = printable(f"{sign}  {meaning}, {count}")
        ax.plot([], [], "s", color="#ffffff", markeredgecolor="0.7", label=text)
    if styles or signs:
        legend = ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return ax
