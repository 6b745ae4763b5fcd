"""One of several processes of which one dies; run by `test_dying_rank` under torchrun."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import headwise as hw
from headwise.lab import MiniGPT, MiniGPTConfig


def main(folder: Path, dies: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(11, context=9, d_model=12, n_heads=3, n_layers=1))
    with hw.observe(model) as watch, torch.no_grad():
        model(torch.full((2, 5), rank))
    if rank != dies:
        watch.table().save(folder / f"table-{rank}.parquet")
    dist.barrier()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    with hw.HeadMonitor(model, 1) as monitor:
        model(torch.full((2, 5), rank)).mean().backward()
        monitor.step()  # waits for the rank that died


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
