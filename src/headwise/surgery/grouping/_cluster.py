"""Clustering of heads: groups of equal size whose members are similar."""

from itertools import combinations, product

import numpy as np
from jaxtyping import Float64


def cluster(distances: Float64[np.ndarray, "n n"], n_groups: int) -> list[list[int]]:
    """Find groups of equal size with small distances within them.

    Groups are built greedily; then pairs of heads swap groups for as long as that helps.

    Args:
        distances: The distance between every two heads: symmetric, with a zero diagonal.
    """
    groups = _greedy(distances, len(distances) // n_groups)
    while _exchange(distances, groups):
        pass
    return sorted(sorted(group) for group in groups)


def _greedy(distances: Float64[np.ndarray, "n n"], size: int) -> list[list[int]]:
    remaining, groups = set(range(len(distances))), []
    while remaining:
        pairs = combinations(sorted(remaining), 2)
        closest = min(pairs, key=distances.__getitem__, default=None)
        group = [*closest] if closest and size > 1 else [min(remaining)]
        while len(group) < size:
            candidates = sorted(remaining - set(group))
            group.append(min(candidates, key=lambda head: distances[head, group].sum()))
        remaining -= set(group)
        groups.append(group)
    return groups


def _exchange(distances: Float64[np.ndarray, "n n"], groups: list[list[int]]) -> bool:
    """Swap every two heads whose swap reduces the distances; return whether any did."""
    changed = False
    for first, second in combinations(groups, 2):
        for i, j in product(range(len(first)), range(len(second))):
            a, b = first[i], second[j]
            before = distances[a, first].sum() + distances[b, second].sum()
            after = distances[b, first].sum() + distances[a, second].sum() - 2 * distances[a, b]
            if after < before - 1e-12 * abs(before):
                first[i], second[j] = b, a
                changed = True
    return changed
