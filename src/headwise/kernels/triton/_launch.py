"""The launch of the kernel: how a task is cut into blocks."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from headwise.kernels.triton._statistics import describe
from headwise.kernels.triton._task import Fields, Task


class Tiles(NamedTuple):
    """Queries and keys of one block, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles_for(width: int, task: Fields) -> Tiles:
    """Blocks as in FlashAttention-2, where registers and shared memory hold them.

    The fastest of a dozen on an H100 (`benchmarks/gpu_tiles.py`).
    """
    if task["q"].itemsize == 4:
        tiles = Tiles(32, 32, 4, 2) if width <= 128 else Tiles(16, 32, 4, 1)
    elif width <= 64 or (width <= 128 and task["heads"] is None):
        tiles = Tiles(128, 64, 4, 3)
    else:
        stages = 3 if _has_room(task["q"]) else 2
        tiles = Tiles(128, 64, 8, stages) if width <= 128 else Tiles(64, 32, 8, 2)
    # Tiles of masks and biases are as large as those of logits: one at a time.
    adds = task["mask"] is not None or task["bias"] is not None
    return tiles._replace(stages=1) if adds else tiles


def _has_room(q: torch.Tensor) -> bool:
    """Whether a multiprocessor of this GPU has 128 KB of shared memory and more."""
    return q.is_cuda and torch.cuda.get_device_capability(q.device) in ((8, 0), (9, 0), (10, 0))


def launch(fields: Fields) -> None:
    """Solve a task: the kernel writes the outputs among its fields."""
    q, v, classes = fields["q"], fields["v"], fields["classes"]
    B, H, T, D = q.shape
    if not B * H * T:
        return
    sizes = {"D": D, "Dv": v.shape[3], "C": 0 if classes is None else classes.shape[2]}
    width, values, members = (max(16, triton.next_power_of_2(n)) for n in sizes.values())
    tiles = tiles_for(max(width, values), fields)
    rows = min(tiles.rows, max(16, triton.next_power_of_2(T)))
    known = {"WIDTH": width, "VALUES": values, "CLASSES": members, "ROWS": rows, "KEYS": tiles.keys}
    compiled = {name: tl.constexpr(n) for name, n in (sizes | known).items()}
    programs = B * H * triton.cdiv(T, rows)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        describe[(programs,)](
            Task(**(fields | compiled)), num_warps=tiles.warps, num_stages=tiles.stages
        )
