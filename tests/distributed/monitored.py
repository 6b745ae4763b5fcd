"""One of two processes that train on halves of a batch; run by `test_monitor`."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.monitor import Above, HeadMonitor

RULES = (Above("max_logit", -99.0),)


def make_model() -> MiniGPT:
    torch.manual_seed(0)  # the same in every process
    return MiniGPT(MiniGPTConfig(11, context=9, d_model=12, n_heads=3, n_layers=2)).double()


def texts() -> torch.Tensor:
    return torch.randint(0, 11, (3, 4, 9), generator=torch.Generator().manual_seed(1))


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    model = DistributedDataParallel(make_model())
    reductions = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (reductions.append(1), reduce(*args, **kwargs))
    logged, alarms = [], []
    with HeadMonitor(
        model, 2, rules=RULES, log=lambda *row: logged.append(row), on_alarm=alarms.append
    ) as monitor:
        scalars = []
        for batch in texts():
            share = batch.chunk(world)[rank]
            for part in share.split(1):  # gradient accumulation
                model(part).square().mean().backward()
            scalars.append(monitor.step())
    assert len(reductions) == 2, reductions  # steps 1 and 2, not 3
    assert len(logged) == (2 if rank == 0 else 0)
    assert len(alarms) == (1 if rank == 0 else 0)
    said = {"scalars": scalars, "alarms": [str(alarm) for alarm in monitor.alarms]}
    Path(f"{store}.{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
