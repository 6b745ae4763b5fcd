"""The kernel in Triton: a block of queries of one head against all keys that they may see.

Its shape is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): one program for each block of
queries, keys a block at a time, exponentials relative to the largest logit so far. When a larger
one comes, the sums are rescaled; so one pass over the keys is enough for everything that is a sum
over weights. Outputs that are not requested are None, and are compiled away.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from headwise.kernels.triton._logits import (
    LOG2E,
    MASKED,
    address_of,
    bias_of,
    extent,
    logits_of_block,
    queries_of,
    rows_of,
    single_logits,
)

LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
# Logits below this are masked.
MASKED_BELOW = tl.constexpr(-0.5e30)


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


class FinishedRows(NamedTuple):
    """Rows after the last key."""

    peak: Any  # the largest logit, or the sink
    kept: Any  # the part of the total that is of real keys
    total: Any  # 1 where that is 0
    weight: Any  # of a key with the largest logit
    none: Any  # whether no key is seen
    nothing: Any  # whether no sink is there either


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
    _finish(t, queries, sums)


@triton.jit
@no_type_check
def _empty_sums(t):
    zeros, whole = tl.zeros([t.ROWS], tl.float32), tl.zeros([t.ROWS], tl.int32)
    of_classes = tl.zeros([t.ROWS, t.CLASSES], tl.float32) if t.classes is not None else None
    return OnlineSums(
        peak=zeros + MASKED,
        total=zeros,
        heads=tl.zeros([t.ROWS, t.VALUES], tl.float32) if t.heads is not None else None,
        n_keys=whole,
        moment=zeros if t.entropy is not None else None,
        unbiased=zeros + MASKED if t.bias is not None or t.table is not None else None,
        largest=whole - 1 if t.argmax is not None else None,
        squares=zeros if t.participation is not None else None,
        distance=zeros if t.distance is not None else None,
        even=zeros if t.distance is not None else None,
        classes=of_classes,
        members=of_classes,
    )


@triton.jit
@no_type_check
def _sweep(t, queries, sums, start, stop, EDGE: tl.constexpr):
    for first in range(start, stop, t.KEYS):
        sums = _add(
            t, queries, sums, logits_of_block(t, queries, first + tl.arange(0, t.KEYS), EDGE)
        )
    return sums


@triton.jit
@no_type_check
def _add(t, queries, sums, block):
    """Add a block of keys."""
    logits, unbiased = block.logits, sums.unbiased
    if unbiased is not None:
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
    if moment is not None:
        moment = factor * (moment + down * sums.total) + tl.sum(p * shifted, 1)
    if largest is not None:
        first = tl.min(tl.where(logits == highest[:, None], block.keys[None, :], t.S), 1)
        largest = tl.where(highest > sums.peak, first, largest)
    if squares is not None:
        squares = factor * factor * squares + tl.sum(p * p, 1)
    distance, even = _add_distances(t, queries, sums, block, p, factor)
    classes, members = _add_classes(t, queries, sums, block, p, factor)
    return OnlineSums(
        peak=peak,
        total=factor * sums.total + tl.sum(p, 1),
        heads=_add_values(t, queries, sums, block, p, factor),
        n_keys=sums.n_keys + (t.KEYS if block.seen is None else tl.sum(block.seen.to(tl.int32), 1)),
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
def _add_values(t, queries, sums, block, p, factor):
    heads = sums.heads
    if heads is not None:
        heads = heads * factor[:, None]
        v = rows_of(t, t.v, t.v_stride, queries, block.keys, t.Dv, t.VALUES)
        if block.seen is not None:
            # A masked value has a weight of 0, and 0 times NaN would be NaN.
            is_finite = tl.abs(v.to(tl.float32)) < INF
            is_nonfinite = tl.min(is_finite.to(tl.int32), 1) == 0
            reached = tl.max((block.seen & is_nonfinite[None, :]).to(tl.int32), 1) > 0
            heads = tl.where(reached[:, None], NAN, heads)
            v = tl.where(is_finite, v, 0.0)
        heads = tl.dot(p.to(v.dtype), v, heads, input_precision="ieee")
    return heads


@triton.jit
@no_type_check
def _add_distances(t, queries, sums, block, p, factor):
    distance, even = sums.distance, sums.even
    if distance is not None:
        i = tl.load(t.query_at + queries.b * t.T + queries.rows, mask=queries.rows < t.T, other=0.0)
        j = tl.load(t.key_at + queries.b * t.S + block.keys, mask=block.keys < t.S, other=0.0)
        away = tl.abs(i[:, None] - j[None, :])
        distance = factor * distance + tl.sum(p * away, 1)
        even += tl.sum(away if block.seen is None else tl.where(block.seen, away, 0.0), 1)
    return distance, even


@triton.jit
@no_type_check
def _add_classes(t, queries, sums, block, p, factor):
    classes, members = sums.classes, sums.members
    if classes is not None:
        columns = tl.arange(0, t.CLASSES)
        inside = (block.keys < t.S)[:, None] & (columns < t.C)[None, :]
        place = (queries.b * t.S + block.keys[:, None]) * t.C + columns[None, :]
        share = tl.load(t.classes + place, mask=inside, other=0.0)
        classes = tl.dot(p, share, factor[:, None] * classes, input_precision="ieee")
        if block.seen is None:
            members += tl.sum(share, 0)[None, :]
        else:
            members = tl.dot(block.seen.to(tl.float32), share, members, input_precision="ieee")
    return classes, members


@triton.jit
@no_type_check
def _finish(t, queries, sums):
    """Write the outputs, after the sinks have taken their part."""
    peak, kept, moment = sums.peak, sums.total, sums.moment
    factor, total = tl.zeros_like(kept) + 1.0, kept
    if t.sinks is not None:
        sink = tl.load(t.sinks + queries.h) * LOG2E
        peak = tl.maximum(peak, sink)
        down = sums.peak - peak
        factor = tl.exp2(down)
        if moment is not None:
            moment = factor * (moment + down * kept)
        kept = factor * kept
        total = kept + tl.exp2(sink - peak)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    weight = tl.where(nothing, 0.0, factor / total)
    end = FinishedRows(peak, kept, total, weight, sums.peak < MASKED_BELOW, nothing)
    row = (queries.b * t.H + queries.h) * t.T + queries.rows
    _write_rows(t, queries, sums, end, row)
    _write_spread(t, queries, sums, end, row, moment)
    _write_heads(t, queries, sums, end)
    _write_classes(t, queries, sums, end, row)
    _write_keys(t, queries, end, row)


@triton.jit
@no_type_check
def _write_rows(t, queries, sums, end, row):
    real = queries.rows < t.T
    lse = tl.where(end.nothing, -INF, (end.peak + tl.log2(end.total)) * LN2)
    top = sums.peak if sums.unbiased is None else sums.unbiased
    top = tl.where(end.none, -INF, top * LN2)
    if t.lse is not None:
        tl.store(t.lse + row, lse, mask=real)
    if t.n_keys is not None:
        tl.store(t.n_keys + row, sums.n_keys, mask=real)
    if t.max_logit is not None:  # the maximum of NaN may be anything
        tl.store(t.max_logit + row, tl.where(lse == lse, top, lse), mask=real)
    if t.max_weight is not None:
        tl.store(t.max_weight + row, end.weight, mask=real)
    if t.argmax is not None:
        tl.store(t.argmax + row, sums.largest, mask=real)
    if t.sink is not None:
        tl.store(t.sink + row, 1.0 - end.kept / end.total, mask=real)


@triton.jit
@no_type_check
def _write_spread(t, queries, sums, end, row, moment):
    real = queries.rows < t.T
    if t.entropy is not None:
        nats = (tl.log2(end.total) * end.kept - moment) / end.total * LN2
        # A row of one key has an entropy of 0; rounding must not make it negative.
        tl.store(t.entropy + row, tl.where(nats < 0.0, 0.0, nats), mask=real)
    if t.participation is not None:
        squares = tl.where(end.none, 1.0, sums.squares)
        tl.store(t.participation + row, sums.total * sums.total / squares, mask=real)
    if t.distance is not None:
        seen = tl.maximum(sums.n_keys, 1).to(tl.float32)
        tl.store(t.distance + row, sums.distance * end.weight, mask=real)
        tl.store(t.even_distance + row, sums.even / seen, mask=real)


@triton.jit
@no_type_check
def _write_heads(t, queries, sums, end):
    if t.heads is not None:
        columns = tl.arange(0, t.VALUES)[None, :]
        rows = queries.rows[:, None]
        place = address_of(t.heads, t.heads_stride, queries.b, queries.h, rows, columns)
        tl.store(place, sums.heads * end.weight[:, None], mask=(rows < t.T) & (columns < t.Dv))


@triton.jit
@no_type_check
def _write_classes(t, queries, sums, end, row):
    if t.classes is not None:
        columns = tl.arange(0, t.CLASSES)[None, :]
        place, inside = (
            row[:, None] * t.C + columns,
            (queries.rows < t.T)[:, None] & (columns < t.C),
        )
        tl.store(t.class_mass + place, sums.classes * end.weight[:, None], mask=inside)
        tl.store(t.class_keys + place, sums.members, mask=inside)


@triton.jit
@no_type_check
def _write_keys(t, queries, end, row):
    """The mass on single keys, whose logits are computed again: they are few, and anywhere."""
    if t.keys is not None:
        real = queries.rows < t.T
        for n in range(t.N):
            place = (queries.b * t.T + queries.rows) * t.N + n
            logits, seen = single_logits(t, queries, tl.load(t.keys + place, mask=real, other=-1))
            mass = tl.exp2(logits - tl.where(end.none, 0.0, end.peak)) / end.total
            tl.store(t.key_mass + row * t.N + n, mass, mask=real)
            tl.store(t.key_seen + row * t.N + n, seen.to(tl.uint8), mask=real)
