"""Row statistics from the pages of keys that vLLM keeps on a CPU, read in place by our kernel."""

import ctypes
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from headwise._library import NO_MEMORY, library
from headwise.errors import UnsupportedError

# The statistics in the order of the kernel. Those of the spans follow them.
STATISTICS = ("entropy", "max_weight", "first", "self", "previous", "distance", "max_logit", "lse")
SPANS = 4
COLUMNS = len(STATISTICS) + SPANS
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# By vLLM's name of an instruction set: the layout of its pages ([D, page], or
# [page / 16, D / 2, 16, 2]), their element types, and what the width of a head is a multiple of.
LAYOUTS = {
    "vec": (0, (torch.float32, torch.bfloat16), 2),
    "vec16": (0, (torch.float32, torch.bfloat16), 2),
    "amx": (1, (torch.bfloat16,), 32),
}
PAGE_STEP = 32  # keys that are multiplied at once
# After a fork the pool of threads is gone, and waiting for it would hang.
_threads = {"most": 1 << 20}
os.register_at_fork(after_in_child=lambda: _threads.update(most=1))


class Sums(NamedTuple):
    """Sums over rows, by cell: a cell is whatever the caller adds up, such as one request."""

    total: Float64[np.ndarray, "cells H columns"]
    count: Float64[np.ndarray, "cells columns"]  # type: ignore[assignment]  # a method of tuples
    even: Float64[np.ndarray, "cells columns"]  # under uniform attention; NaN without a meaning
    maximum: Float64[np.ndarray, "cells H columns"]  # NaN where no row counts

    @classmethod
    def empty(cls, n_cells: int, n_heads: int) -> "Sums":
        by_head, of_layer = (n_cells, n_heads, COLUMNS), (n_cells, COLUMNS)
        maximum = np.full(by_head, np.nan)
        return cls(np.zeros(by_head), np.zeros(of_layer), np.zeros(of_layer), maximum)


class PageLayer(ctypes.Structure):
    """What does not change between steps: `PageLayer` of the kernel, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "layout", "H", "Hkv", "D", "page")),
        *(("window", ctypes.c_int64), ("scale", ctypes.c_double), ("softcap", ctypes.c_double)),
        *(("query_stride", ctypes.c_int64 * 2), ("keys", ctypes.c_void_p)),
        ("key_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_void_p) for name in Sums._fields),
    )
    cache: Tensor  # kept alive, as are the sums
    sums: Sums

    def add_to(self, sums: Sums) -> None:
        """Choose the sums that rows are added to."""
        self.sums = sums
        for name, array in sums._asdict().items():
            setattr(self, name, array.ctypes.data)


class Step(ctypes.Structure):
    """The rows of a step: `PageStep` of the kernel, field by field."""

    _fields_ = (
        *(("threads", ctypes.c_int64), ("table", ctypes.c_void_p)),
        *(("table_stride", ctypes.c_int64), ("n_groups", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("groups", "rows", "spans")),
    )
    kept: Any


def open_layer(
    name: str, isa: str, cache: Float[Tensor, "blocks Hkv page twice_D"], n_heads: int,
    *, scale: float, softcap: float = 0.0, window: int = -1,
) -> PageLayer:  # fmt: skip
    """Describe a layer: `isa` says how its pages lie; a window counts the query's own position.

    Raises:
        UnsupportedError: the kernel is missing, or does not read such pages.
    """
    _, Hkv, page, both = cache.shape
    layout, dtypes, step = LAYOUTS.get(isa, (0, (), 1))
    why = None if library() else library().why
    if not hasattr(library().functions, "headwise_pages"):
        why = why or f"the native kernel {library().name} is too old. Build it again."
    elif not dtypes:
        why = f"its pages have the layout {isa!r}. Those of {', '.join(LAYOUTS)} are read."
    elif cache.dtype not in dtypes:
        why = f"{cache.dtype} with the layout {isa!r}. Read are {', '.join(map(str, dtypes))}."
    elif page % PAGE_STEP or both % (2 * step) or not cache[:1].is_contiguous():
        why = (
            f"pages of {page} keys of {both // 2} numbers. Read are dense ones of a multiple of "
            f"{PAGE_STEP} keys (block_size) and, with the layout {isa!r}, of {step} numbers."
        )
    if why is not None:
        raise UnsupportedError(f"vllm.watch: {name}: {why}")
    layer = PageLayer(
        DTYPES[cache.dtype], layout, n_heads, Hkv, both // 2, page, max(window, 0), scale, softcap,
        (0, 0), cache.data_ptr(), cache.stride()[:2],
    )  # fmt: skip
    layer.cache = cache
    return layer


def make_step(
    table: Int[Tensor, "requests blocks"],
    groups: Int64[np.ndarray, "groups four"],
    rows: Int64[np.ndarray, "rows two"],
    spans: Int64[np.ndarray, "cells spans two"],
) -> Step:
    """Describe the rows of a step, the same for all layers that share a block table.

    Args:
        table: The number of each block of each request, in int32.
        groups: First row, one past the last row, request, cell. Each cell may occur once.
        rows: The token in the batch, and its position in its request.
        spans: For each cell, the first position of each stretch and one past its last.
    """
    step = Step(
        min(torch.get_num_threads(), _threads["most"]), table.data_ptr(), table.stride(0),
        len(groups), groups.ctypes.data, rows.ctypes.data, spans.ctypes.data,
    )  # fmt: skip
    step.kept = table, groups, rows, spans
    return step


def add_rows(layer: PageLayer, step: Step, query: Float[Tensor, "tokens H D"]) -> None:
    """Add the statistics of a step's rows to the sums of a layer."""
    layer.query_stride = query.stride()[:2]
    arguments = ctypes.byref(layer), ctypes.byref(step), ctypes.c_void_p(query.data_ptr())
    functions: Any = library().functions
    if functions.headwise_pages(*arguments) == NO_MEMORY:
        raise MemoryError(f"vllm.watch: out of memory for queries of {layer.D} numbers.")
