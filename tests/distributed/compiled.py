"""One of several processes that train a compiled model; run by `test_tensor_parallel`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import headwise as hw
from distributed.watch_ddp import llama
from oracles import assert_tables_close

IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 1, 8, 2], [10, 3, 3, 12, 1], [1, 2, 3, 4, 5]])
# The first runs uncompiled while it is watched, and the second in graphs.
STEPS = 2


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def sharded(model: Any, *, compiles_layers: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if compiles_layers:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp_around_compiled(model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    model = DistributedDataParallel(compiled(model))
    return model, model


# The model that is watched, and what is called.
WAYS: tuple[Callable[[Any], tuple[nn.Module, Callable[..., Any]]], ...] = (
    ddp_around_compiled,
    lambda model: (model, compiled(DistributedDataParallel(model))),
    lambda model: (sharded(model, compiles_layers=True), model),
    lambda model: (sharded(model, compiles_layers=False), compiled(model)),
)


def step(call: Callable[..., Any], model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The loss and the gradients of the last of some steps."""
    for _ in range(STEPS):
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return [loss, *(x.to_local() if isinstance(x, DTensor) else x for x in gradients)]


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    alone, ids = llama(), IDS.chunk(world)[rank]
    with hw.observe(alone) as watch:
        step(alone, alone, IDS)
    known = watch.table()
    for make in WAYS:
        torch._dynamo.reset()
        model, call = make(llama())
        unwatched = step(call, model, ids)
        graphs = counters["stats"]["unique_graphs"]
        with hw.observe(model) as watch:
            watched = step(call, model, ids)
        assert counters["stats"]["unique_graphs"] > graphs
        assert all(torch.equal(x, y) for x, y in zip(watched, unwatched, strict=True))
        tables: list[Any] = [None] * world
        dist.all_gather_object(tables, watch.table())
        assert_tables_close(hw.HeadTable.sum(tables), known, rtol=1e-5)
    dist.destroy_process_group()
