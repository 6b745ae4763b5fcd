"""The launch of the kernel in Triton: a task is one flat structure, cut into blocks."""

from collections import namedtuple
from contextlib import nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from headwise.kernels._contract import (
    AttentionProblem,
    Named,
    RowReduction,
    RowRequest,
    RowStatistics,
)
from headwise.kernels._rule import check_rule, lower
from headwise.kernels.rows import LOG2E
from headwise.kernels.triton._statistics import describe, receive

# The fields of a task, while they are filled in.
Fields = dict[str, Any]
# By the names of `RowStatistics`: [B, H, T, Dv]; [B, H, T]; [B, H, T, N], the seen in bytes;
# [B, H, T, C].
_OUTPUTS = " ".join(field.name for field in fields(RowStatistics) if field.name != "kernel")
# Tensors, sizes and numbers; a field that is left out is None. Strides are those of texts, heads,
# queries (or keys) and the last axis; without them an array is dense.
Task = namedtuple(  # type: ignore[misc]  # mypy wants a literal
    "Task",
    "q k v q_stride k_stride v_stride H G T S "
    # Logits are products * factor; under a cap, cap * tanh of that. Both are in base 2.
    "factor cap left right "
    # [B, 2], [B, S], bytes, a bias, [H]; the table has that of query i and key j at S - 1 + i - j.
    "key_range documents mask mask_stride bias bias_stride table table_stride sinks "
    # [B, T], [B, S], without which the last query is at the last key; [B, T, N]; [B, S, C].
    "query_at key_at N keys classes "
    f"{_OUTPUTS} heads_stride "
    # For what keys receive: the queries that count; their largest logits, sums of 2 ** logit.
    "counted peak total "
    # With sums, an output is its number among K. [M, K, H, blocks or 1, 3], [K, B, H, blocks];
    # [B, T], bytes; [B, T].
    "sums highest real texts K every "
    # Compiled in: widths and classes, powers of two that hold them, and the sides of a block.
    "D Dv C WIDTH VALUES CLASSES ROWS KEYS",
)


@torch.no_grad()
def compute_heads(problem: AttentionProblem) -> Named:
    """The `heads`, their `lse` and, if requested, their `entropy`."""
    q, task = problem.q, _task_of(problem)
    names = ["lse", "entropy"] if problem.extras.entropy else ["lse"]
    outputs = {name: q.new_empty(q.shape[:3], dtype=torch.float32) for name in names}
    task |= outputs
    outputs["heads"] = _add_heads(task, q.dtype)
    launch(task)
    return outputs


@torch.no_grad()
def compute_statistics(problem: AttentionProblem, request: RowRequest) -> RowStatistics:
    """Statistics of every row, and heads in float32."""
    q, S, has_sinks = problem.q, problem.k.shape[2], problem.rule.sinks is not None
    task = _task_of(problem) | request.inputs(len(q), S, q.device)
    shapes = request.outputs(q.shape[:3], has_sinks).items()
    outputs = {name: q.new_empty(shape, dtype=dtype) for name, (shape, dtype) in shapes}
    task |= outputs
    if request.keys is not None:  # Triton has no booleans in memory
        task |= {"N": request.keys.shape[2], "key_seen": outputs["key_seen"].view(torch.uint8)}
    if request.heads:
        outputs["heads"] = _add_heads(task, torch.float32)
    if request.received is not None:
        task |= {name: torch.empty_like(outputs["lse"]) for name in ("peak", "total")}
        task["received"] = outputs["received"] = q.new_empty((*q.shape[:2], S), dtype=torch.float32)
    launch(task)
    return RowStatistics(**outputs, kernel="triton")


@torch.no_grad()
def compute_sums(
    problem: AttentionProblem, request: RowRequest, reduction: RowReduction
) -> tuple[Float[Tensor, "3 K M H"], Float[Tensor, "K H"]]:
    """The sums of statistics over rows, and the largest values.

    Each block of queries has a slot of its own, so that the order of programs changes no bit.
    Blocks of packed texts share one: they add up in any order, in float64.
    """
    q, (B, H, T, _), S = problem.q, problem.q.shape, problem.k.shape[2]
    numbers, K, real, texts, M, every = reduction
    task = _task_of(problem) | request.inputs(B, S, q.device)
    task |= {name: tl.constexpr(first) for name, (first, *_) in numbers.items()}
    if request.keys is not None:  # at most four, whose numbers are the bytes of one
        task["N"] = request.keys.shape[2]
        task["key_mass"] = sum(n << 8 * i for i, n in enumerate(numbers["key_mass"]))
    task |= {"K": tl.constexpr(K), "every": tl.constexpr(every), "texts": texts}
    task["real"] = real.contiguous().view(torch.uint8)
    blocks = triton.cdiv(T, _compiled(task)[0]["ROWS"])
    sums = q.new_zeros((M, K, H, blocks if texts is None else 1, 3), dtype=torch.float64)
    highest = q.new_empty((K, B, H, blocks), dtype=torch.float64)
    launch(task | {"sums": sums, "highest": highest})
    return sums.sum(3).permute(3, 1, 0, 2), highest.amax((1, 3))


def _task_of(problem: AttentionProblem) -> Fields:
    """The inputs of a task: queries, keys, values and their rule."""
    q, k, v, rule, *_ = problem
    check_rule(rule, q, k)
    (B, H, T, _), (_, Hkv, S, _) = q.shape, k.shape
    lowered = lower(rule, T, S, q.device)
    capped, most = lowered.softcap > 0, T + S
    fields: Fields = dict.fromkeys(Task._fields) | {"q": q, "k": k, "v": v}
    fields |= {"H": H, "G": H // Hkv, "T": T, "S": S, "N": 0}
    fields["factor"] = lowered.scale / lowered.softcap if capped else lowered.scale * LOG2E
    fields["cap"] = lowered.softcap * LOG2E if capped else None
    # A window is at most as wide as the text.
    fields["left"] = most if lowered.left is None else min(lowered.left, most)
    fields["right"] = most if lowered.right is None else min(lowered.right, most)
    if lowered.key_range is not None:
        fields["key_range"] = _dense(lowered.key_range, q, torch.int32, B, 2)
    if lowered.documents is not None:
        fields["documents"] = _dense(lowered.documents, q, torch.int64, B, S)
    if lowered.mask is not None:
        fields["mask"] = lowered.mask.to(q.device).view(torch.uint8).expand(B, H, T, S)
    if lowered.sinks is not None:
        fields["sinks"] = _dense(lowered.sinks, q, torch.float32, H)
    if lowered.bias is not None:
        fields["bias"] = lowered.bias.detach().to(q.device).expand(B, H, T, S)
    if lowered.by_distance is not None:
        table = lowered.by_distance.detach().to(q.device, torch.float32).contiguous()
        fields["table"] = table.expand(B, H, T + S - 1)
    for name in ("q", "k", "v", "mask", "bias", "table"):
        if fields[name] is not None:
            fields[f"{name}_stride"] = fields[name].stride()
    return fields


def _dense(x: Tensor, q: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return x.detach().to(q.device, dtype).expand(shape).contiguous()


def _add_heads(task: Fields, dtype: torch.dtype) -> Tensor:
    """Add heads in the layout of torch's kernel: the heads of a token side by side."""
    q, Dv = task["q"], task["v"].shape[3]
    B, H, T, _ = q.shape
    heads = q.new_empty(B, T, H, Dv, dtype=dtype).transpose(1, 2)
    task |= {"heads": heads, "heads_stride": heads.stride()}
    return heads


class Tiles(NamedTuple):
    """Queries and keys of one block, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles_for(width: int, task: Fields) -> Tiles:
    """Blocks as in FlashAttention-2, where registers and shared memory hold them.

    The fastest of a dozen on an H100.
    """
    if task["q"].itemsize == 4:
        tiles = Tiles(32, 32, 4, 2) if width <= 128 else Tiles(16, 32, 4, 1)
    elif width <= 64 or (width <= 128 and task["heads"] is None):
        tiles = Tiles(128, 64, 4, 3)
    else:
        # Whether a multiprocessor of this GPU has 128 KB of shared memory and more.
        rooms, q = ((8, 0), (9, 0), (10, 0)), task["q"]
        has_room = q.is_cuda and torch.cuda.get_device_capability(q.device) in rooms
        stages = 3 if has_room else 2
        tiles = Tiles(128, 64, 8, stages) if width <= 128 else Tiles(64, 32, 8, 2)
    # Tiles of masks and biases are as large as those of logits: one at a time.
    adds = task["mask"] is not None or task["bias"] is not None
    return tiles._replace(stages=1) if adds else tiles


def launch(fields: Fields) -> None:
    """Solve a task: the kernels write the outputs among its fields."""
    q, (B, H, T, _) = fields["q"], fields["q"].shape
    sizes, tiles = _compiled(fields)
    task = Task(**(fields | {name: tl.constexpr(n) for name, n in sizes.items()}))
    programs = [(describe, B * H * triton.cdiv(T, sizes["ROWS"]))]
    if fields["received"] is not None:
        programs += [(receive, B * H * triton.cdiv(fields["S"], sizes["KEYS"]))]
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        for kernel, n in programs:
            if n:
                kernel[(n,)](task, num_warps=tiles.warps, num_stages=tiles.stages)


def _compiled(fields: Fields) -> tuple[dict[str, int], Tiles]:
    """The sizes that are compiled in, and the blocks in which they are processed."""
    q, v, classes = fields["q"], fields["v"], fields["classes"]
    T, D = q.shape[2:]
    sizes = {"D": D, "Dv": v.shape[3], "C": 0 if classes is None else classes.shape[2]}
    width, values, members = (max(16, triton.next_power_of_2(n)) for n in sizes.values())
    tiles = tiles_for(max(width, values), fields)
    rows = min(tiles.rows, max(16, triton.next_power_of_2(T)))
    known = {"WIDTH": width, "VALUES": values, "CLASSES": members, "ROWS": rows, "KEYS": tiles.keys}
    return sizes | known, tiles
