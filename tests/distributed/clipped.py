"""One of several processes that train with QK-clip: run by `test_qk_clip`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.monitor import HeadMonitor, QKClip
from ranks import shard_heads

BAR, STEPS = 1.1, 3
WAYS = ("ddp", "fsdp of blocks", "fsdp of all", "tensor parallel")


def make_model() -> MiniGPT:
    torch.manual_seed(0)  # the same in every process
    # An odd number of rows per head, so that shards end within heads.
    model = MiniGPT(MiniGPTConfig(11, context=9, d_model=12, n_heads=4, n_kv_heads=2, n_layers=2))
    return model.double()


def texts() -> Tensor:
    return torch.randint(0, 11, (STEPS, 4, 9), generator=torch.Generator().manual_seed(1))


def wrap(model: MiniGPT, way: str, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "tensor parallel":
        for block in model.blocks:
            shard_heads(block.attention, mesh)
        return model
    if way == "fsdp of blocks":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    model: nn.Module, batches: list[Tensor], group: dist.ProcessGroup | None = None
) -> list[list[tuple[str, float]]]:
    """The clipped heads of each step, with their factors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    clips = []
    with HeadMonitor(model, 1, statistics=["max_logit"], group=group) as monitor:
        clip = QKClip(monitor, BAR)
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            report = clip.step()
            clips.append([(str(head.head), head.factor) for head in report.heads])
    return clips


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    alone = [dist.new_group([other]) for other in range(world)][rank]
    results = {way: result(way, rank, world, alone) for way in WAYS}
    torch.save(results, Path(f"{store}.{rank}.pt"))
    dist.destroy_process_group()


def result(way: str, rank: int, world: int, alone: dist.ProcessGroup) -> dict[str, Any]:
    whole = way == "tensor parallel"  # each rank has some of the heads, and reads all texts
    batches = [batch if whole else batch.chunk(world)[rank] for batch in texts()]
    model = wrap(make_model(), way, world)
    clips = train(model, batches, alone if whole else None)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    weights = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in inner.state_dict().items()
    }
    return {"clips": clips, "weights": weights}
