"""Logits of queries and keys in Triton, their masks and biases.

Logits are in base 2 throughout: a GPU has an instruction for powers of two.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The logit of a masked key: far below any other, and finite, so that 0 times it is 0.
MASKED = tl.constexpr(-1.0e30)
# Logits below this are masked.
MASKED_BELOW = tl.constexpr(-0.5e30)
INF = tl.constexpr(float("inf"))


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
