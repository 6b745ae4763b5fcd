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

# Logits are in base 2 throughout: a GPU has an instruction for powers of two.
LOG2E = tl.constexpr(1.4426950408889634)
# The logit of a masked key: far below any other, and finite, so that 0 times it is 0.
MASKED = tl.constexpr(-1.0e30)
# Logits below this are masked.
MASKED_BELOW = tl.constexpr(-0.5e30)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
LN2 = tl.constexpr(0.6931471805599453)


class Queries(NamedTuple):
    """The queries of one program."""

    b: Any  # their text
    h: Any  # their head
    rows: Any  # [ROWS]
    q: Any  # [ROWS, WIDTH]
    at: Any  # [ROWS]: their positions in the text
    # The first and the last key that lengths and windows leave to each row; a row beyond the last
    # query sees none.
    low: Any  # [ROWS]
    high: Any  # [ROWS]


class KeyBlock(NamedTuple):
    """A block of keys, as these queries see them."""

    first: Any  # its first key
    keys: Any  # [KEYS]
    logits: Any  # [ROWS, KEYS]: without bias; MASKED where masked


@triton.jit
@no_type_check
def queries_of(t, head, first):
    """A block of queries of one head."""
    b, h = (head // t.H).to(tl.int64), (head % t.H).to(tl.int64)
    rows, columns = first + tl.arange(0, t.ROWS), tl.arange(0, t.WIDTH)
    inside = (rows < t.T)[:, None] & (columns < t.D)[None, :]
    q = tl.load(
        address_of(t.q, t.q_stride, b, h, rows[:, None], columns[None, :]), mask=inside, other=0.0
    )
    low, high = 0, t.S
    if t.key_range is not None:
        low, high = tl.load(t.key_range + 2 * b), tl.load(t.key_range + 2 * b + 1)
    position = rows + (t.S - t.T)
    low = tl.maximum(position - t.left, low)
    high = tl.where(rows < t.T, tl.minimum(position + t.right, high - 1), -1)
    at = position.to(tl.float32)
    if t.query_at is not None:
        at = tl.load(t.query_at + b * t.T + rows, mask=rows < t.T, other=0.0)
    return Queries(b, h, rows, q, at, low, high)


@triton.jit
@no_type_check
def extent(t, b, first):
    """The range of keys outside of which all are masked, and that within which none is."""
    position = first + t.S - t.T
    last = tl.minimum(position + t.ROWS, t.S) - 1
    low, high = 0, t.S
    if t.key_range is not None:
        low, high = tl.load(t.key_range + 2 * b), tl.load(t.key_range + 2 * b + 1)
    start = tl.maximum(position - t.left, low) // t.KEYS * t.KEYS
    stop = tl.maximum(tl.minimum(last + t.right + 1, high), start)
    open_start = tl.minimum(tl.cdiv(tl.maximum(last - t.left, low), t.KEYS) * t.KEYS, stop)
    open_stop = tl.minimum(tl.maximum(position + t.right + 1, 0), high) // t.KEYS * t.KEYS
    if t.documents is not None or t.mask is not None:
        open_stop = 0
    return start, open_start, tl.maximum(open_stop, open_start), stop


@triton.jit
@no_type_check
def logits_of_block(t, queries, first, EDGE: tl.constexpr):
    """The logits of a block of keys; without EDGE none of them is masked."""
    keys = first + tl.arange(0, t.KEYS)
    k = rows_of(t, t.k, t.k_stride, queries, keys, t.D, t.WIDTH, EDGE)
    logits = _logit(t, tl.dot(queries.q, tl.trans(k), input_precision="ieee"))
    if EDGE:
        low, high = queries.low[:, None], queries.high[:, None]
        seen = _visible(t, queries, queries.rows[:, None], keys[None, :], low, high)
        logits = tl.where(seen, logits, MASKED)
    return KeyBlock(first, keys, logits)


@triton.jit
@no_type_check
def single_logits(t, queries, keys):
    """The logits of one key for each query, with bias, and whether it is visible."""
    seen = _visible(t, queries, queries.rows, keys, queries.low, queries.high)
    k = rows_of(t, t.k, t.k_stride, queries, tl.where(seen, keys, t.S), t.D, t.WIDTH, True)
    logits = _logit(t, tl.sum(queries.q.to(tl.float32) * k.to(tl.float32), 1))
    if t.bias is not None or t.table is not None:
        logits += bias_of(t, queries, queries.rows, keys)
    return tl.where(seen, logits, MASKED), seen


@triton.jit
@no_type_check
def rows_of(t, start, stride, queries, keys, width, WIDTH: tl.constexpr, EDGE: tl.constexpr):
    """The rows of keys or values; 0 beyond the last of them, and beyond their width."""
    columns = tl.arange(0, WIDTH)
    place = address_of(start, stride, queries.b, queries.h // t.G, keys[:, None], columns[None, :])
    if EDGE:
        inside = (keys < t.S)[:, None] & (columns < width)[None, :]
        x = tl.load(place, mask=inside, other=0.0)
    elif width == WIDTH:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=(columns < width)[None, :], other=0.0)
    return x


@triton.jit
@no_type_check
def bias_of(t, queries, i, j):
    """The bias of logits, for arrays of queries and keys that broadcast."""
    inside = (j >= 0) & (j < t.S) & (i < t.T)
    added = tl.zeros(inside.shape, tl.float32)
    if t.bias is not None:
        place = address_of(t.bias, t.bias_stride, queries.b, queries.h, i, j)
        added += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if t.table is not None:
        line = t.table + (queries.b * t.table_stride[0] + queries.h * t.table_stride[1])
        added += tl.load(line + (t.S - 1 + i - j), mask=inside, other=0.0)
    return added * LOG2E


@triton.jit
@no_type_check
def address_of(start, stride, b, h, i, j):
    """The address of an entry of a text and head, in 64 bits: a mask may be that large."""
    return start + (
        b * stride[0] + h * stride[1] + i.to(tl.int64) * stride[2] + j.to(tl.int64) * stride[3]
    )


@triton.jit
@no_type_check
def _logit(t, product):
    x = product * t.factor
    if t.cap is not None:
        # 1 - e loses digits for a small x, for which the series is accurate.
        e, square = tl.exp2(tl.abs(x) * (-2.0 * LOG2E)), x * x
        small = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        large = (1.0 - e) / (1.0 + e)
        x = tl.where(tl.abs(x) < 0.125, small, tl.where(x < 0.0, -large, large)) * t.cap
    return x


@triton.jit
@no_type_check
def _visible(t, queries, i, j, low, high):
    """Whether queries may attend to keys, for arrays of all that broadcast."""
    seen = (j >= low) & (j <= high)
    if t.documents is not None:
        ids = t.documents + queries.b * t.S
        own = tl.load(ids + (i + t.S - t.T), mask=i < t.T, other=0)
        seen &= own == tl.load(ids + j, mask=seen, other=0)
    if t.mask is not None:
        place = address_of(t.mask, t.mask_stride, queries.b, queries.h, i, j)
        seen &= tl.load(place, mask=seen, other=0) != 0
    return seen


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
    _write_outputs(t, queries, sums)


@triton.jit
@no_type_check
def receive(t):
    """Add up what a block of keys of one head receives, after `describe`."""
    blocks, head = tl.cdiv(t.S, t.KEYS), tl.program_id(0) // tl.cdiv(t.S, t.KEYS)
    key = tl.program_id(0) % blocks * t.KEYS
    received = tl.zeros([t.KEYS], tl.float32)
    # The queries that windows leave to these keys.
    at = key + t.T - t.S
    start = tl.maximum(at - t.right, 0) // t.ROWS * t.ROWS
    for first in range(start, tl.minimum(at + t.KEYS + t.left, t.T), t.ROWS):
        queries = queries_of(t, head, first)
        logits = logits_of_block(t, queries, key, True).logits
        seen = logits != MASKED
        if t.bias is not None or t.table is not None:
            logits += bias_of(
                t, queries, queries.rows[:, None], (key + tl.arange(0, t.KEYS))[None, :]
            )
        real, row = queries.rows < t.T, head.to(tl.int64) * t.T + queries.rows
        peak = tl.load(t.peak + row, mask=real, other=0.0)[:, None]
        total = tl.load(t.total + row, mask=real, other=1.0)[:, None]
        counts = tl.load(t.counted + queries.b * t.T + queries.rows, mask=real, other=0) != 0
        p = tl.where(seen & counts[:, None], tl.exp2(logits - peak) / total, 0.0)
        received += tl.sum(p, 0)
    keys = key + tl.arange(0, t.KEYS)
    tl.store(t.received + head.to(tl.int64) * t.S + keys, received, mask=keys < t.S)


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


@triton.jit
@no_type_check
def _write_outputs(t, queries, sums):
    """Write the outputs, after the sinks have taken their part."""
    # What is of real keys alone, and the total with the sink; 1 where that is 0.
    peak, kept, moment = sums.peak, sums.total, sums.moment
    factor, total = tl.zeros_like(kept) + 1.0, kept
    if t.sinks is not None:
        sink = tl.load(t.sinks + queries.h) * LOG2E
        peak = tl.maximum(peak, sink)
        down = sums.peak - peak
        factor = tl.exp2(down)
        if t.entropy is not None:
            moment = factor * (moment + down * kept)
        kept = factor * kept
        total = kept + tl.exp2(sink - peak)
    nothing = total == 0.0  # neither a key nor a sink
    none = sums.peak < MASKED_BELOW  # no key
    total = tl.where(nothing, 1.0, total)
    weight = tl.where(nothing, 0.0, factor / total)  # of a key with the largest logit
    row = (queries.b * t.H + queries.h) * t.T + queries.rows
    real = queries.rows < t.T
    # With sums, the rows that count: those with a key, or several.
    n_keys = tl.maximum(sums.n_keys, 1).to(tl.float32)
    counts, several, no_value = real, real, tl.zeros_like(kept) + NAN
    if t.sums is not None:
        place = t.real + queries.b * t.T + queries.rows
        counts = (tl.load(place, mask=real, other=0) != 0) & (sums.n_keys > 0)
        several = counts & ((sums.n_keys > 1) | t.every)

    if t.received is not None:
        _put(t, queries, t.peak, peak, counts, no_value)
        _put(t, queries, t.total, total, counts, no_value)
    lse = tl.where(nothing, -INF, (peak + tl.log2(total)) * LN2)
    if t.lse is not None:
        _put(t, queries, t.lse, lse, counts, no_value)
    if t.n_keys is not None:
        _put(t, queries, t.n_keys, sums.n_keys, counts, no_value)
    if t.max_logit is not None:  # the maximum of NaN may be anything
        top = sums.peak if t.bias is None and t.table is None else sums.unbiased
        top = tl.where(none, -INF, top * LN2)
        _put(t, queries, t.max_logit, tl.where(lse == lse, top, lse), counts, no_value)
    if t.max_weight is not None:
        _put(t, queries, t.max_weight, weight, several, 1.0 / n_keys)
    if t.argmax is not None:
        _put(t, queries, t.argmax, sums.largest, counts, no_value)
    if t.sink is not None:
        has_sink = counts if t.sinks is not None else queries.rows < 0
        _put(t, queries, t.sink, 1.0 - kept / total, has_sink, no_value)
    if t.entropy is not None:
        nats = (tl.log2(total) * kept - moment) / total * LN2
        # A row of one key has an entropy of 0; rounding must not make it negative.
        nats = tl.where(nats < 0.0, 0.0, nats)
        _put(t, queries, t.entropy, nats, several, tl.log(n_keys))
    if t.participation is not None:
        squares = tl.where(none, 1.0, sums.squares)
        _put(t, queries, t.participation, sums.total * sums.total / squares, several, n_keys)
    if t.distance is not None:
        even = sums.even / n_keys
        _put(t, queries, t.distance, sums.distance * weight, several, even)
        if t.sums is None:
            _put(t, queries, t.even_distance, even, several, no_value)
    if t.heads is not None:
        columns = tl.arange(0, t.VALUES)[None, :]
        rows = queries.rows[:, None]
        place = address_of(t.heads, t.heads_stride, queries.b, queries.h, rows, columns)
        tl.store(place, sums.heads * weight[:, None], mask=(rows < t.T) & (columns < t.Dv))
    if t.classes is not None:
        columns = tl.arange(0, t.CLASSES)[None, :]
        if t.sums is None:
            place = row[:, None] * t.C + columns
            inside = real[:, None] & (columns < t.C)
            tl.store(t.class_mass + place, sums.classes * weight[:, None], mask=inside)
            tl.store(t.class_keys + place, sums.members, mask=inside)
        else:
            for c in range(t.C):
                of_class = tl.sum(tl.where(columns == c, sums.classes, 0.0), 1) * weight
                members = tl.sum(tl.where(columns == c, sums.members, 0.0), 1)
                of_row = several & ((members > 0.0) | t.every)
                _put(t, queries, t.class_mass + c, of_class, of_row, members / n_keys)
    if t.keys is not None:
        # The logits of single keys are computed again: few, at arbitrary places. The loop has names
        # of its own, since Triton carries every known name through it, in one shape.
        for n in range(t.N):
            key = tl.load(t.keys + (queries.b * t.T + queries.rows) * t.N + n, mask=real, other=-1)
            logits, is_seen = single_logits(t, queries, key)
            mass = tl.exp2(logits - tl.where(none, 0.0, peak)) / total
            if t.sums is None:
                tl.store(t.key_mass + row * t.N + n, mass, mask=real)
                tl.store(t.key_seen + row * t.N + n, is_seen.to(tl.uint8), mask=real)
            else:
                number = (t.key_mass >> (8 * n)) & 255
                of_row = several & (is_seen | t.every)
                _put(t, queries, number, mass, of_row, is_seen.to(tl.float32) / n_keys)


@triton.jit
@no_type_check
def _put(t, queries, output, values, counts, even):
    """Write a statistic of each row, or add it up over the rows that count.

    `even` is its value under uniform weights. With sums, `output` is the number of the statistic.
    """
    b, h, rows = queries.b, queries.h, queries.rows
    if t.sums is None:
        tl.store(output + (b * t.H + h) * t.T + rows, values, mask=rows < t.T)
    else:
        program, slots = tl.program_id(0), tl.cdiv(t.T, t.ROWS)
        texts, first, last = tl.zeros([t.ROWS], tl.int64) + b, b, b
        if t.texts is not None:
            slots = 1
            texts = tl.load(t.texts + b * t.T + rows, mask=rows < t.T, other=-1)
            last = tl.max(texts, 0)
            first = tl.min(tl.where(texts < 0, last + 1, texts), 0)
        for text in range(first, last + 1):
            own, of_text = counts & (texts == text), (text * t.K + output) * t.H + h
            place = t.sums + (of_text * slots + program % slots) * 3
            total = tl.sum(tl.where(own, values, 0.0).to(tl.float64), 0)
            of_even = tl.where(own, even, even * 0.0)  # NaN where there is no such value
            tl.atomic_add(place, tl.sum(own.to(tl.float64), 0), sem="relaxed")
            tl.atomic_add(place + 1, total, sem="relaxed")
            tl.atomic_add(place + 2, tl.sum(of_even.to(tl.float64), 0), sem="relaxed")
        # The maximum may leave NaN out, which the sum does not.
        largest = tl.max(tl.where(counts, values, -INF), 0)
        all_counted = tl.sum(tl.where(counts, values, 0.0), 0)
        largest = tl.where(all_counted == all_counted, largest, all_counted)
        tl.store(t.highest + output * tl.num_programs(0).to(tl.int64) + program, largest)
