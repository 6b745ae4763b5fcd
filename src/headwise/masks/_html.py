"""A mask as squares in HTML, for notebooks: no script."""

from jaxtyping import Bool
from torch import Tensor

_SQUARE = 10  # pixels
MOST = 32  # queries and keys that are shown


def squares_html(
    visible: Bool[Tensor, "#B #H #R #n"], lengths: tuple[int, int], batch: tuple[int, int]
) -> str:
    """The mask of the first text and head: a row per query, filled where it may attend.

    Args:
        visible: The mask on the last queries and keys.
        lengths: The numbers of all queries and keys.
        batch: The numbers of texts and of heads.
    """
    T, S = lengths
    R, n = min(T, MOST), min(S, MOST)
    shown = visible.expand(-1, -1, R, n)[0, 0].tolist() if visible.numel() else []
    squares = "".join(
        f'<rect x="{_SQUARE * column}" y="{_SQUARE * row}" width="{_SQUARE - 1}" '
        f'height="{_SQUARE - 1}" fill="{"#2c728e" if attends else "#eeeeee"}"/>'
        for row, line in enumerate(shown)
        for column, attends in enumerate(line)
    )
    part = "" if (R, n) == (T, S) else f", the last {R} and {n} shown"
    several = "" if batch == (1, 1) else f"; the first of {batch[0]} texts and {batch[1]} heads"
    return (
        f'<figure style="margin:0;font:12px sans-serif"><svg width="{_SQUARE * n}" '
        f'height="{_SQUARE * R}" role="img" aria-label="which keys a query sees">{squares}</svg>'
        f"<figcaption>{T} queries (rows), {S} keys{part}{several}</figcaption></figure>"
    )
