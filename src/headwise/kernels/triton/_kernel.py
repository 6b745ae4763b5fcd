"""The kernel, in Triton's language: some queries of one head against all keys that they may see.

Its shape is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691): one program for each block of
queries, keys a block at a time, exponentials relative to the largest logit so far. When a larger
one comes, what was summed is scaled down; so one pass over the keys is enough for everything that
is a sum over weights. What was not asked for is None: it is left out when the kernel is compiled.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from headwise.kernels.triton._logits import (
    HIDDEN,
    LOG2E,
    bias_of,
    extent,
    look,
    look_at_one,
    place_of,
    queries_of,
    rows_of,
)

LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
# What is below is hidden.
NONE = tl.constexpr(-0.5e30)


class Sums(NamedTuple):
    """What is known of each row so far, and summed over its keys."""

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


class End(NamedTuple):
    """Rows at their end."""

    peak: Any  # the largest logit, or the sink
    kept: Any  # of what adds up to the total, the part of real keys
    total: Any  # 1 where that is 0
    weight: Any  # of a key with the largest logit
    none: Any  # whether no key is seen
    nothing: Any  # whether no sink is there either


@triton.jit
@no_type_check
def describe(t):
    """All that a task asks for, for one block of queries of one head."""
    blocks = tl.cdiv(t.T, t.ROWS)
    # Under a causal mask the last queries see most: they begin first.
    first = (blocks - 1 - tl.program_id(0) % blocks) * t.ROWS
    mine = queries_of(t, tl.program_id(0) // blocks, first)
    start, open_start, open_stop, stop = extent(t, mine.b, first)
    sums = _sweep(t, mine, _nothing(t), start, open_start, True)
    sums = _sweep(t, mine, sums, open_start, open_stop, False)
    sums = _sweep(t, mine, sums, open_stop, stop, True)
    _finish(t, mine, sums)


@triton.jit
@no_type_check
def _nothing(t):
    zeros, whole = tl.zeros([t.ROWS], tl.float32), tl.zeros([t.ROWS], tl.int32)
    of_classes = tl.zeros([t.ROWS, t.CLASSES], tl.float32) if t.classes is not None else None
    return Sums(
        peak=zeros + HIDDEN,
        total=zeros,
        heads=tl.zeros([t.ROWS, t.VALUES], tl.float32) if t.heads is not None else None,
        n_keys=whole,
        moment=zeros if t.entropy is not None else None,
        unbiased=zeros + HIDDEN if t.bias is not None or t.table is not None else None,
        largest=whole - 1 if t.argmax is not None else None,
        squares=zeros if t.participation is not None else None,
        distance=zeros if t.distance is not None else None,
        even=zeros if t.distance is not None else None,
        classes=of_classes,
        members=of_classes,
    )


@triton.jit
@no_type_check
def _sweep(t, mine, sums, start, stop, EDGE: tl.constexpr):
    for at in range(start, stop, t.KEYS):
        sums = _add(t, mine, sums, look(t, mine, at + tl.arange(0, t.KEYS), EDGE))
    return sums


@triton.jit
@no_type_check
def _add(t, mine, sums, block):
    """Take in a block of keys."""
    logits, unbiased = block.logits, sums.unbiased
    if unbiased is not None:
        unbiased = tl.maximum(unbiased, tl.max(logits, 1))
        logits += bias_of(t, mine, mine.rows[:, None], block.keys[None, :])
    highest = tl.max(logits, 1)
    peak = tl.maximum(sums.peak, highest)
    # Rows that have seen nothing yet have sums of 0, which any factor leaves.
    down = sums.peak - peak
    less = tl.exp2(down)
    bent = logits - tl.where(peak < NONE, 0.0, peak)[:, None]
    p = tl.exp2(bent)
    moment, largest, squares = sums.moment, sums.largest, sums.squares
    if moment is not None:
        moment = less * (moment + down * sums.total) + tl.sum(p * bent, 1)
    if largest is not None:
        first = tl.min(tl.where(logits == highest[:, None], block.keys[None, :], t.S), 1)
        largest = tl.where(highest > sums.peak, first, largest)
    if squares is not None:
        squares = less * less * squares + tl.sum(p * p, 1)
    distance, even = _add_distances(t, mine, sums, block, p, less)
    classes, members = _add_classes(t, mine, sums, block, p, less)
    return Sums(
        peak=peak,
        total=less * sums.total + tl.sum(p, 1),
        heads=_add_values(t, mine, sums, block, p, less),
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
def _add_values(t, mine, sums, block, p, less):
    heads = sums.heads
    if heads is not None:
        heads = heads * less[:, None]
        v = rows_of(t, t.v, t.v_step, mine, block.keys, t.Dv, t.VALUES)
        if block.seen is not None:
            # A hidden value counts 0 times, and 0 times what is no number would be none.
            fine = tl.abs(v.to(tl.float32)) < INF
            spoilt = tl.min(fine.to(tl.int32), 1) == 0
            reached = tl.max((block.seen & spoilt[None, :]).to(tl.int32), 1) > 0
            heads = tl.where(reached[:, None], NAN, heads)
            v = tl.where(fine, v, 0.0)
        heads = tl.dot(p.to(v.dtype), v, heads, input_precision="ieee")
    return heads


@triton.jit
@no_type_check
def _add_distances(t, mine, sums, block, p, less):
    distance, even = sums.distance, sums.even
    if distance is not None:
        i = tl.load(t.query_at + mine.b * t.T + mine.rows, mask=mine.rows < t.T, other=0.0)
        j = tl.load(t.key_at + mine.b * t.S + block.keys, mask=block.keys < t.S, other=0.0)
        away = tl.abs(i[:, None] - j[None, :])
        distance = less * distance + tl.sum(p * away, 1)
        even += tl.sum(away if block.seen is None else tl.where(block.seen, away, 0.0), 1)
    return distance, even


@triton.jit
@no_type_check
def _add_classes(t, mine, sums, block, p, less):
    classes, members = sums.classes, sums.members
    if classes is not None:
        at = tl.arange(0, t.CLASSES)
        inside = (block.keys < t.S)[:, None] & (at < t.C)[None, :]
        place = (mine.b * t.S + block.keys[:, None]) * t.C + at[None, :]
        share = tl.load(t.classes + place, mask=inside, other=0.0)
        classes = tl.dot(p, share, less[:, None] * classes, input_precision="ieee")
        if block.seen is None:
            members += tl.sum(share, 0)[None, :]
        else:
            members = tl.dot(block.seen.to(tl.float32), share, members, input_precision="ieee")
    return classes, members


@triton.jit
@no_type_check
def _finish(t, mine, sums):
    """Write down what was found, once a sink has taken its part."""
    peak, kept, moment = sums.peak, sums.total, sums.moment
    less, total = tl.zeros_like(kept) + 1.0, kept
    if t.sinks is not None:
        sink = tl.load(t.sinks + mine.h) * LOG2E
        peak = tl.maximum(peak, sink)
        down = sums.peak - peak
        less = tl.exp2(down)
        if moment is not None:
            moment = less * (moment + down * kept)
        kept = less * kept
        total = kept + tl.exp2(sink - peak)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    weight = tl.where(nothing, 0.0, less / total)
    end = End(peak, kept, total, weight, sums.peak < NONE, nothing)
    row = (mine.b * t.H + mine.h) * t.T + mine.rows
    _write_rows(t, mine, sums, end, row)
    _write_spread(t, mine, sums, end, row, moment)
    _write_heads(t, mine, sums, end)
    _write_classes(t, mine, sums, end, row)
    _write_keys(t, mine, end, row)


@triton.jit
@no_type_check
def _write_rows(t, mine, sums, end, row):
    real = mine.rows < t.T
    lse = tl.where(end.nothing, -INF, (end.peak + tl.log2(end.total)) * LN2)
    top = sums.peak if sums.unbiased is None else sums.unbiased
    top = tl.where(end.none, -INF, top * LN2)
    if t.lse is not None:
        tl.store(t.lse + row, lse, mask=real)
    if t.n_keys is not None:
        tl.store(t.n_keys + row, sums.n_keys, mask=real)
    if t.max_logit is not None:  # the largest of no numbers may be anything
        tl.store(t.max_logit + row, tl.where(lse == lse, top, lse), mask=real)
    if t.max_weight is not None:
        tl.store(t.max_weight + row, end.weight, mask=real)
    if t.argmax is not None:
        tl.store(t.argmax + row, sums.largest, mask=real)
    if t.sink is not None:
        tl.store(t.sink + row, 1.0 - end.kept / end.total, mask=real)


@triton.jit
@no_type_check
def _write_spread(t, mine, sums, end, row, moment):
    real = mine.rows < t.T
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
def _write_heads(t, mine, sums, end):
    if t.heads is not None:
        at = tl.arange(0, t.VALUES)[None, :]
        rows = mine.rows[:, None]
        place = place_of(t.heads, t.heads_step, mine.b, mine.h, rows, at)
        tl.store(place, sums.heads * end.weight[:, None], mask=(rows < t.T) & (at < t.Dv))


@triton.jit
@no_type_check
def _write_classes(t, mine, sums, end, row):
    if t.classes is not None:
        at = tl.arange(0, t.CLASSES)[None, :]
        place, inside = row[:, None] * t.C + at, (mine.rows < t.T)[:, None] & (at < t.C)
        tl.store(t.class_mass + place, sums.classes * end.weight[:, None], mask=inside)
        tl.store(t.class_keys + place, sums.members, mask=inside)


@triton.jit
@no_type_check
def _write_keys(t, mine, end, row):
    """The mass on single keys, whose logits are computed once more: few, and of any place."""
    if t.keys is not None:
        real = mine.rows < t.T
        for n in range(t.N):
            place = (mine.b * t.T + mine.rows) * t.N + n
            logits, seen = look_at_one(t, mine, tl.load(t.keys + place, mask=real, other=-1))
            mass = tl.exp2(logits - tl.where(end.none, 0.0, end.peak)) / end.total
            tl.store(t.key_mass + row * t.N + n, mass, mask=real)
            tl.store(t.key_seen + row * t.N + n, seen.to(tl.uint8), mask=real)
