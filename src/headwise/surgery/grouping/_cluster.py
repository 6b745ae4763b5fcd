"""Which heads come together: groups of equal size whose members are alike."""

from itertools import combinations, product

import numpy as np
from jaxtyping import Float64


def neighbors(n: int, n_groups: int) -> list[list[int]]:
    """Groups of neighbors."""
    return np.arange(n).reshape(n_groups, -1).tolist()


def cluster(apart: Float64[np.ndarray, "n n"], n_groups: int) -> list[list[int]]:
    """Groups of equal size with little apart within them.

    Heads join greedily, then change places in twos for as long as that helps.

    Args:
        apart: How far each two heads are apart: the same both ways, and nothing from itself.
    """
    groups = _greedy(apart, len(apart) // n_groups)
    while _exchange(apart, groups):
        pass
    return sorted(sorted(group) for group in groups)


def _greedy(apart: Float64[np.ndarray, "n n"], size: int) -> list[list[int]]:
    left, groups = set(range(len(apart))), []
    while left:
        two = min(combinations(sorted(left), 2), key=apart.__getitem__, default=None)
        group = [*two] if two and size > 1 else [min(left)]
        while len(group) < size:
            others = sorted(left - set(group))
            group.append(min(others, key=lambda head: apart[head, group].sum()))
        left -= set(group)
        groups.append(group)
    return groups


def _exchange(apart: Float64[np.ndarray, "n n"], groups: list[list[int]]) -> bool:
    """Let two heads change places where that brings groups closer; whether any did."""
    changed = False
    for one, two in combinations(groups, 2):
        for i, j in product(range(len(one)), range(len(two))):
            a, b = one[i], two[j]
            now = apart[a, one].sum() + apart[b, two].sum()
            then = apart[b, one].sum() + apart[a, two].sum() - 2 * apart[a, b]
            if then < now - 1e-12 * abs(now):
                one[i], two[j] = b, a
                changed = True
    return changed
