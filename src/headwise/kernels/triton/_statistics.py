"""The kernel in Triton: a block of queries of one head against all keys that they may see.

Its shape is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): one program for each block of
queries, keys a block at a time, exponentials relative to the largest logit so far. When a larger
one comes, the sums are rescaled; so one pass over the keys is enough for everything that is a sum
over weights. An output that is not requested is None in the task: what only it needs is compiled
away, and its sum is a zero that nothing reads (Triton 3.6 cannot return None from a function).
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from headwise.kernels.triton._logits import (
    INF,
    MASKED,
    MASKED_BELOW,
    bias_of,
    extent,
    logits_of_block,
    queries_of,
    rows_of,
)
from headwise.kernels.triton._outputs import write_outputs

NAN = tl.constexpr(float("nan"))


class OnlineSums(NamedTuple):
    """The online softmax: what is known of each row so far, and summed over its keys."""

    peak: Any  # the largest logit
    total: Any  # of p = 2 ** (logit - peak)
    heads: Any  # of p * value
    n_keys: Any
    moment: Any  # of p * (logit - peak)
    unbiased: Any  # the largest logit without bias
    largest: Any  # the first key with the largest logit
    squares: Any  # of p * p
    distance: Any  # of p * distance
    even: Any  # of distances
    classes: Any  # of p * member
    members: Any  # of members


@triton.jit
@no_type_check
def describe(t):
    """Compute all outputs of a task, for one block of queries of one head."""
    blocks = tl.cdiv(t.T, t.ROWS)
    # Under a causal mask the last queries see most: they begin first.
    first = (blocks - 1 - tl.program_id(0) % blocks) * t.ROWS
    queries = queries_of(t, tl.program_id(0) // blocks, first)
    start, open_start, open_stop, stop = extent(t, queries.b, first)
    sums = _sweep(t, queries, _empty_sums(t), start, open_start, True)
    sums = _sweep(t, queries, sums, open_start, open_stop, False)
    sums = _sweep(t, queries, sums, open_stop, stop, True)
    write_outputs(t, queries, sums)


@triton.jit
@no_type_check
def _empty_sums(t):
    zeros, whole = tl.zeros([t.ROWS], tl.float32), tl.zeros([t.ROWS], tl.int32)
    of_classes = tl.zeros([t.ROWS, t.CLASSES], tl.float32) if t.classes is not None else zeros
    return OnlineSums(
        peak=zeros + MASKED,
        total=zeros,
        heads=tl.zeros([t.ROWS, t.VALUES], tl.float32) if t.heads is not None else zeros,
        n_keys=whole,
        moment=zeros,
        unbiased=zeros + MASKED,
        largest=whole - 1,
        squares=zeros,
        distance=zeros,
        even=zeros,
        classes=of_classes,
        members=of_classes,
    )


@triton.jit
@no_type_check
def _sweep(t, queries, sums, start, stop, EDGE: tl.constexpr):
    for first in range(start, stop, t.KEYS):
        sums = _add(t, queries, sums, logits_of_block(t, queries, first, EDGE), EDGE)
    return sums


@triton.jit
@no_type_check
def _add(t, queries, sums, block, EDGE: tl.constexpr):
    """Add a block of keys."""
    logits, unbiased = block.logits, sums.unbiased
    if t.bias is not None or t.table is not None:
        unbiased = tl.maximum(unbiased, tl.max(logits, 1))
        logits += bias_of(t, queries, queries.rows[:, None], block.keys[None, :])
    highest = tl.max(logits, 1)
    peak = tl.maximum(sums.peak, highest)
    # Rows without a visible key so far have sums of 0, which any factor leaves.
    down = sums.peak - peak
    factor = tl.exp2(down)
    shifted = logits - tl.where(peak < MASKED_BELOW, 0.0, peak)[:, None]
    p = tl.exp2(shifted)
    moment, largest, squares = sums.moment, sums.largest, sums.squares
    if t.entropy is not None:
        moment = factor * (moment + down * sums.total) + tl.sum(p * shifted, 1)
    if t.argmax is not None:
        first = tl.min(tl.where(logits == highest[:, None], block.keys[None, :], t.S), 1)
        largest = tl.where(highest > sums.peak, first, largest)
    if t.participation is not None:
        squares = factor * factor * squares + tl.sum(p * p, 1)
    distance, even = _add_distances(t, queries, sums, block, p, factor, EDGE)
    classes, members = _add_classes(t, queries, sums, block, p, factor, EDGE)
    return OnlineSums(
        peak=peak,
        total=factor * sums.total + tl.sum(p, 1),
        heads=_add_values(t, queries, sums, block, p, factor, EDGE),
        n_keys=sums.n_keys + (_sum_seen(block, 1.0).to(tl.int32) if EDGE else t.KEYS),
        moment=moment,
        unbiased=unbiased,
        largest=largest,
        squares=squares,
        distance=distance,
        even=even,
        classes=classes,
        members=members,
    )


@triton.jit
@no_type_check
def _add_values(t, queries, sums, block, p, factor, EDGE: tl.constexpr):
    heads = sums.heads
    if t.heads is not None:
        heads = heads * factor[:, None]
        v = rows_of(t, t.v, t.v_stride, queries, block.keys, t.Dv, t.VALUES, EDGE)
        if EDGE:
            # A masked value has a weight of 0, and 0 times NaN would be NaN.
            is_finite = tl.abs(v.to(tl.float32)) < INF
            is_nonfinite = tl.min(is_finite.to(tl.int32), 1) == 0
            if tl.max(is_nonfinite.to(tl.int32), 0) > 0:
                seen = (block.logits != MASKED) & is_nonfinite[None, :]
                reached = tl.max(tl.where(seen, 1.0, 0.0), 1) > 0.0
                heads = tl.where(reached[:, None], NAN, heads)
            v = tl.where(is_finite, v, 0.0)
        heads = tl.dot(p.to(v.dtype), v, heads, input_precision="ieee")
    return heads


@triton.jit
@no_type_check
def _add_distances(t, queries, sums, block, p, factor, EDGE: tl.constexpr):
    distance, even = sums.distance, sums.even
    if t.distance is not None:
        at = block.keys.to(tl.float32)
        if t.key_at is not None:
            mask = block.keys < t.S
            at = tl.load(t.key_at + queries.b * t.S + block.keys, mask=mask, other=0.0)
        away = tl.abs(queries.at[:, None] - at[None, :])
        distance = factor * distance + tl.sum(p * away, 1)
        if EDGE or t.key_at is not None:
            even += _sum_seen(block, away)
        else:
            even += _distance_to_block(t, queries.at, block.first)
    return distance, even


@triton.jit
@no_type_check
def _distance_to_block(t, at, first):
    """The sum of the distances of each row from all columns of a block."""
    before, after = at - first, first + (t.KEYS - 1) - at
    within = before * (before + 1.0) + after * (after + 1.0)
    beside = tl.abs(before - after) * t.KEYS
    return 0.5 * tl.where((before >= 0.0) & (after >= 0.0), within, beside)


@triton.jit
@no_type_check
def _sum_seen(block, x):
    """The sum over visible keys: those whose logits are not MASKED.

    A mask computed apart would be summed in another register layout, which is slow.
    """
    return tl.sum(tl.where(block.logits == MASKED, 0.0, x), 1)


@triton.jit
@no_type_check
def _add_classes(t, queries, sums, block, p, factor, EDGE: tl.constexpr):
    classes, members = sums.classes, sums.members
    if t.classes is not None:
        columns = tl.arange(0, t.CLASSES)
        inside = (block.keys < t.S)[:, None] & (columns < t.C)[None, :]
        place = (queries.b * t.S + block.keys[:, None]) * t.C + columns[None, :]
        share = tl.load(t.classes + place, mask=inside, other=0.0)
        classes = tl.dot(p, share, factor[:, None] * classes, input_precision="ieee")
        if EDGE:
            seen = (block.logits != MASKED).to(tl.float32)
            members = tl.dot(seen, share, members, input_precision="ieee")
        else:
            members += tl.sum(share, 0)[None, :]
    return classes, members
