"""What the Triton kernel writes: the outputs of a block of queries after its last key."""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

from headwise.kernels.triton._logits import INF, LOG2E, MASKED_BELOW, address_of, single_logits

LN2 = tl.constexpr(0.6931471805599453)


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
def write_outputs(t, queries, sums):
    """Write the outputs, after the sinks have taken their part."""
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
    top = sums.peak if t.bias is None and t.table is None else sums.unbiased
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
        place = row[:, None] * t.C + columns
        inside = (queries.rows < t.T)[:, None] & (columns < t.C)
        tl.store(t.class_mass + place, sums.classes * end.weight[:, None], mask=inside)
        tl.store(t.class_keys + place, sums.members, mask=inside)


@triton.jit
@no_type_check
def _write_keys(t, queries, end, row):
    """The mass on single keys, whose logits are computed again: few, at arbitrary places."""
    if t.keys is not None:
        real = queries.rows < t.T
        for n in range(t.N):
            place = (queries.b * t.T + queries.rows) * t.N + n
            logits, seen = single_logits(t, queries, tl.load(t.keys + place, mask=real, other=-1))
            mass = tl.exp2(logits - tl.where(end.none, 0.0, end.peak)) / end.total
            tl.store(t.key_mass + row * t.N + n, mass, mask=real)
            tl.store(t.key_seen + row * t.N + n, seen.to(tl.uint8), mask=real)
