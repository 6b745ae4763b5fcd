"""Sums over the queries of served requests: over pages of keys (`pages.hpp`), or in one pass."""

import ctypes
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from headwise._native_library import NO_MEMORY, library
from headwise.errors import UnsupportedError
from headwise.kernels._attend import row_statistics
from headwise.kernels._contract import RowRequest
from headwise.kernels._rule import AttentionRule
from headwise.kernels.native import most_threads

# The columns of a request's sums, in the order of the kernel. Those of its spans follow them.
STATISTICS = ("entropy", "max_weight", "distance", "max_logit", "lse", "first", "self", "previous")
SPANS = 4
# The sums of a column: over its eligible rows, their number, the sum under uniform attention (NaN
# where that has no meaning), and the largest value. These are of no row.
NOTHING = (0.0, 0.0, 0.0, np.nan)
Sums = Float64[np.ndarray, "H columns 4"]
# By vLLM's name of an instruction set: the layout of its pages ([D, page], or
# [page / 16, D / 2, 16, 2]), their element types, and what the width of a head is a multiple of.
LAYOUTS = {
    "vec": (0, (torch.float32, torch.bfloat16), 2),
    "vec16": (0, (torch.float32, torch.bfloat16), 2),
    "amx": (1, (torch.bfloat16,), 32),
}
PAGE_STEP = 32  # keys that are multiplied at once
_INT, _POINTER, _STRIDES = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64 * 2


class PageLayer(ctypes.Structure):
    """What does not change between steps: `PageLayer` of the kernel, field by field."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "layout", "first_head", "H", "Hkv", "D", "page")),
        *(("window", _INT), ("scale", ctypes.c_double), ("softcap", ctypes.c_double)),
        *(("keys", _POINTER), ("key_stride", _STRIDES)),
    )
    cache: Tensor  # kept alive


class PageStep(ctypes.Structure):
    """The rows of a step: `PageStep` of the kernel, field by field."""

    _fields_ = (
        *(("threads", _INT), ("n_groups", _INT), ("groups", _POINTER), ("rows", _POINTER)),
        *(("query", _POINTER), ("query_stride", _STRIDES)),
        *(("table", _POINTER), ("table_stride", _INT)),
    )
    arrays: Any  # kept alive


def empty_sums(*sizes: int) -> Float64[np.ndarray, "*sizes columns 4"]:
    """The sums over no rows."""
    return np.tile(NOTHING, (*sizes, len(STATISTICS) + SPANS, 1))


def open_layer(layer: Any) -> PageLayer:
    """Describe one of vLLM's attention layers: its cache, and the rule of its implementation.

    Raises:
        UnsupportedError: the kernel is missing, or does not read such pages.
    """
    isa, cache, impl = layer.isa, layer.kv_cache, layer.impl
    layout, dtypes, step = LAYOUTS.get(isa, (0, (), 1))
    _, Hkv, page, both = cache.shape
    why = None if library() else library().why
    if not hasattr(library().functions, "headwise_paged_rows"):
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
        raise UnsupportedError(f"vllm.watch: {layer.layer_name}: {why}")
    opened = PageLayer(
        int(cache.dtype == torch.bfloat16), layout, 0, layer.num_heads, Hkv, both // 2, page,
        max(impl.sliding_window, 0), impl.scale, impl.logits_soft_cap, cache.data_ptr(),
        cache.stride()[:2],
    )  # fmt: skip
    opened.cache = cache
    return opened


def make_step(
    groups: Int64[np.ndarray, "groups 12"], rows: Int64[np.ndarray, "rows 2"]
) -> PageStep:
    """Describe the rows of a step, the same for all layers.

    Args:
        groups: First row, one past the last row, request in the batch, address of the sums of all
            heads, and of each span the first position and one past the last. The sums of two
            groups may not be the same.
        rows: The token in the batch, and its position in its request.
    """
    step = PageStep(most_threads(), len(groups), groups.ctypes.data, rows.ctypes.data)
    step.arrays = groups, rows
    return step


def add_rows(
    layer: PageLayer,
    step: PageStep,
    table: Int[Tensor, "requests blocks"],
    query: Float[Tensor, "tokens H D"],
) -> None:
    """Add the statistics of a step's rows in a layer; the table has each request's blocks."""
    step.query, step.query_stride = query.data_ptr(), query.stride()[:2]
    step.table, step.table_stride = table.data_ptr(), table.stride(0)
    functions: Any = library().functions
    if functions.headwise_paged_rows(ctypes.byref(layer), ctypes.byref(step)) == NO_MEMORY:
        raise MemoryError(f"vllm.watch: out of memory for queries of {layer.D} numbers.")


def prompt_request(n: int, spans: list[int]) -> RowRequest:
    """What is computed of a prompt of n tokens, the same for all layers."""
    positions = torch.arange(n, dtype=torch.int32)
    single = torch.stack([torch.zeros_like(positions), positions, positions - 1], 1)
    begins, ends = torch.tensor(spans).view(-1, 2).T
    is_inside = (positions[:, None] >= begins) & (positions[:, None] < ends)
    return RowRequest(
        distance=True, keys=single[None], heads=True,
        classes=is_inside.float()[None] if any(spans) else None,
    )  # fmt: skip


def answer_prompt(
    rule: AttentionRule,
    request: RowRequest,
    q: Float[Tensor, "n H D"],
    k: Float[Tensor, "n Hkv D"],
    v: Float[Tensor, "n Hkv D"],
    output: Float[Tensor, "n ..."],
    counted: Int64[np.ndarray, " rows"],
    sums: Sums,
) -> None:
    """Write the heads of a whole prompt, and the sums of its counted rows from the same pass."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    rows: Any = row_statistics(q, k, v, rule, request)  # nothing that is requested is None
    output.view(-1, *q.shape[1::2]).copy_(rows.heads[0].transpose(0, 1))
    if not len(counted):
        return

    def of_rows(*columns: Tensor | None) -> Float[Tensor, "H rows columns"]:
        """The counted rows of some columns, each of one statistic or of several."""
        wide = (x[0] if x.ndim == 4 else x[0, ..., None] for x in columns if x is not None)
        return torch.cat([x[:, counted] for x in wide], -1).double()

    values = of_rows(
        rows.entropy, rows.max_weight, rows.distance, rows.max_logit, rows.lse,
        rows.key_mass, rows.class_mass,
    )  # fmt: skip
    # Which rows are eligible, and what uniform attention gives, is the same for all heads, and as
    # in the kernel (`pages.hpp`).
    n_keys, even_distance, *seen = (
        of_rows(x[:, :1])[0]
        for x in (rows.n_keys, rows.even_distance, rows.key_seen, rows.class_keys)
        if x is not None
    )
    several, unknown = n_keys > 1, torch.full_like(n_keys, torch.nan)
    uniform = [
        n_keys.log(),
        1 / n_keys,
        even_distance,
        unknown,
        unknown,
        *(x / n_keys for x in seen),
    ]
    eligible = torch.cat(
        [*[several] * 3, *[n_keys > 0] * 2, *(several & (x > 0) for x in seen)], -1
    )
    largest = torch.where(eligible, values, -torch.inf).amax(1)
    of_columns = sums[:, : values.shape[-1]]
    of_columns[..., 0] = torch.where(eligible, values, 0.0).sum(1).numpy()
    of_columns[..., 1] = eligible.sum(0).numpy()
    of_columns[..., 2] = torch.where(eligible, torch.cat(uniform, -1), 0.0).sum(0).numpy()
    of_columns[..., 3] = largest.masked_fill(~eligible.any(0), torch.nan).numpy()
