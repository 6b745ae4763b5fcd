"""The monotone alignment that takes the most attention, by dynamic programming; NumPy alone."""

import numpy as np
from jaxtyping import Float, Int64


def monotone_spans(weights: Float[np.ndarray, "T S"]) -> Int64[np.ndarray, "T 2"]:
    """The source positions of each output under the best monotone alignment.

    An alignment is a path from the first output and position to the last ones, in steps to the
    next position, the next output, or both; each output is aligned with the positions that the
    path visits in its row, a half-open span. The path has the largest sum of weights above even
    attention, `w − 1/S`, so that a position is shared by two outputs only if both attend to it.
    Of equal paths, an output ends as early as possible.

    Args:
        weights: Attention from outputs to source positions, each row with a sum of 1.
    Source:
        Sakoe & Chiba 1978, the symmetric form, for sums to be maximised.
    """
    T, S = weights.shape
    gains = weights.astype(np.float64) - 1.0 / S
    entry = np.zeros((T, S), dtype=np.int64)  # where the best path to a cell entered its row
    above = np.zeros((T, S), dtype=bool)  # whether it entered from the cell above, not diagonally
    best = np.full(S, -np.inf)  # of the row before
    for row in range(T):
        diagonal = np.concatenate([[-np.inf], best[:-1]])
        above[row] = best > diagonal
        arrival = np.maximum(best, diagonal)
        if row == 0:
            arrival[0] = 0.0
        total = gains[row].cumsum()
        # The best path to column s enters at the column j ≤ s with the largest difference.
        difference = arrival - (total - gains[row])
        largest = np.maximum.accumulate(difference)
        is_new = difference > np.concatenate([[-np.inf], largest[:-1]])
        entry[row] = np.maximum.accumulate(np.where(is_new, np.arange(S), 0))
        best = total + largest
    spans = np.zeros((T, 2), dtype=np.int64)
    column = S - 1
    for row in range(T - 1, -1, -1):
        start = entry[row, column]
        spans[row] = start, column + 1
        column = start if above[row, start] else start - 1
    return spans
