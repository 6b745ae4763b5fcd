"""Choose from scores which tokens each kv head keeps; no model is needed."""

from collections.abc import Mapping, Sequence

from headwise.caching._layer_plan import Window
from headwise.caching._scores import KVHead

Losses = Mapping[KVHead, float]
Choice = dict[KVHead, Window]


def in_order(losses: Losses, per_layer: bool) -> list[KVHead]:
    """The kv heads from the one that loses most when it streams to the one that loses least.

    Args:
        per_layer: Whether the first ones of all layers come before all second ones.
    """
    ordered = sorted(losses, key=lambda head: -losses[head])
    if not per_layer:
        return ordered
    within = {head: [x for x in ordered if x[0] == head[0]].index(head) for head in ordered}
    return sorted(ordered, key=lambda head: within[head])


def keep_first(order: Sequence[KVHead], n_full: int, window: int) -> Choice:
    """The first `n_full` heads keep all tokens, the others a window."""
    return {head: None if i < n_full else window for i, head in enumerate(order)}


def within_bytes(
    losses: Mapping[int, Losses], sizes: Mapping[KVHead, Mapping[Window, int]], budget: int
) -> Choice:
    """The windows that lose least in sum while all heads together keep at most `budget` bytes.

    Each head starts with the smallest window; the step that gains most for its bytes comes
    next, as long as it fits.

    Args:
        losses: For each window what each head loses.
        sizes: For each head what each window takes, and what all tokens take.
    """
    smallest = min(losses)
    choice: Choice = dict.fromkeys(losses[smallest], smallest)
    left = budget - sum(sizes[head][smallest] for head in choice)

    def gain(head: KVHead, window: Window) -> float:
        now = losses[choice[head] or smallest][head]
        return now - (0.0 if window is None else losses[window][head])

    while True:
        steps = [
            (gain(head, window) / more, head, window)
            for head in choice
            if choice[head] is not None
            for window, size in sizes[head].items()
            if 0 < (more := size - sizes[head][choice[head]]) <= left
        ]
        best = max(steps, key=lambda step: step[0], default=None)
        if best is None or best[0] <= 0:
            return choice
        _, head, window = best
        left -= sizes[head][window] - sizes[head][choice[head]]
        choice[head] = window
