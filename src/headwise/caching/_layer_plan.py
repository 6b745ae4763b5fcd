"""The plan of one layer for a cache: which tokens each of its kv heads keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import ArgumentError
from headwise.shapes import is_size

Window = int | None


@dataclass(frozen=True)
class LayerCachePlan:
    """Which tokens the kv heads of one layer keep.

    Attributes:
        layer: The layer, counted from 0.
        windows: For each kv head how many of the last tokens it keeps, a query's own included;
            None for all tokens.
        losses: For each kv head what it loses with its smallest window, in units of the score;
            empty if no scores decided.
        token_bytes: The bytes of one token in one kv head, its key and its value; 0 if unknown.
        sliding_window: The tokens that the model itself lets the layer see; None for all.
    Raises:
        ArgumentError: a window is below 1.
    """

    layer: int
    windows: tuple[Window, ...]
    losses: tuple[float, ...] = ()
    token_bytes: int = 0
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for head, window in enumerate(self.windows):
            if window is not None and not is_size(window):
                raise ArgumentError(
                    f"CachePlan: window={window!r} of L{self.layer}.KV{head}. Give a number of "
                    f"tokens from 1 on, or None for all."
                )

    @property
    def full(self) -> list[int]:
        """The kv heads that keep all tokens."""
        return [head for head, window in enumerate(self.windows) if window is None]

    def tokens(self, n_tokens: int, sinks: int, windows: Sequence[Window] | None = None) -> int:
        """How many tokens all kv heads of the layer keep of a text, with these or other windows."""
        most = min(n_tokens, self.sliding_window or n_tokens)
        limit = self.sliding_window or float("inf")
        return sum(
            most if window is None or window >= limit else min(n_tokens, sinks + window)
            for window in (self.windows if windows is None else windows)
        )


def read_layer(entry: Mapping[str, Any]) -> LayerCachePlan:
    """The plan of a layer from a file.

    Raises:
        ValueError: an entry is not a number of the right kind.
    """
    windows, losses = tuple(entry["windows"]), tuple(map(float, entry["losses"]))
    if type(entry["layer"]) is not int or len(losses) not in (0, len(windows)):
        raise ValueError(f"layer {entry['layer']!r} has {len(losses)} losses of {len(windows)}")
    size, sliding = entry["token_bytes"], entry["sliding_window"]
    if type(size) is not int or size < 0 or not (sliding is None or is_size(sliding)):
        raise ValueError(f"token_bytes={size!r} or sliding_window={sliding!r} are not sizes")
    return LayerCachePlan(entry["layer"], windows, losses, size, sliding)
