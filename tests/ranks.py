"""Runs a script in several processes at once, as the ranks of one group."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run_ranks(script: Path, store: Path, world: int = 2) -> None:
    """Call the script's `main` with its rank, the number of ranks and a path that they share."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(script), str(rank), str(world), str(store)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)


def shard_heads(layer: nn.Module, mesh: Any) -> nn.Module:
    """The layer with a share of its heads in each process."""
    columns = [name for name, _ in layer.named_children() if name.endswith("_proj")]
    plan = {name: ColwiseParallel() for name in columns} | {"out_proj": RowwiseParallel()}
    return parallelize_module(layer, mesh, plan)


if __name__ == "__main__":
    path, number, count, shared = sys.argv[1:]
    runpy.run_path(path)["main"](int(number), int(count), shared)
    # Threads of gloo that outlive their group can abort a process that exits (pytorch#190489).
    os._exit(0)
