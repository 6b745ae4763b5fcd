"""One of several processes that share a model of Transformers; run by `test_sharded`.

A folder with a Llama is beside the store. Texts are split unevenly: rank r reads r + 1 of them.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import headwise as hw
from headwise.lab import MiniGPT, MiniGPTConfig
from headwise.models import fingerprint
from ranks import shard_heads

STATISTICS = ("entropy", "max_logit", "first")


def texts(world: int) -> Tensor:
    """One text for the first rank, two for the next, and so on."""
    rng = torch.Generator().manual_seed(1)
    return torch.randint(1, 13, (world * (world + 1) // 2, 7), generator=rng)


def share(ids: Tensor, rank: int) -> Tensor:
    return ids[rank * (rank + 1) // 2 :][: rank + 1]


def mini_gpt() -> MiniGPT:
    torch.manual_seed(0)
    config = MiniGPTConfig(13, context=9, d_model=18, n_heads=6, n_kv_heads=3, n_layers=2)
    return MiniGPT(config).double()


def table_of(model: nn.Module, ids: Tensor) -> hw.HeadTable:
    with hw.observe(model, hw.Request(statistics=STATISTICS)) as watch, torch.no_grad():
        model(ids)
    return watch.table()


def tensor_parallel(folder: Path, ids: Tensor) -> hw.HeadTable:
    """The table of this rank's heads; every rank reads all texts."""
    distributed = transformers.DistributedConfig(tp_plan="auto")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=distributed)
    request = hw.Request(statistics=STATISTICS, maps=True)
    with hw.observe(model.eval(), request) as watch, torch.no_grad():
        model(ids)
    for layer in watch.layers():  # a head has its own weights, whichever process computes it
        weights = torch.cat([block.weights.clone() for block in layer.blocks()], 1)
        for index, head in enumerate(layer.heads):
            torch.testing.assert_close(watch.weights(head), weights[:, index])
    return watch.table()


def monitored(model: nn.Module, ids: Tensor) -> dict[str, float]:
    with hw.HeadMonitor(model, 1, statistics=STATISTICS) as monitor:
        model(ids).square().mean().backward()
        return monitor.step()


def fully_sharded(world: int) -> nn.Module:
    model, mesh = mini_gpt(), init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def save_layer(folder: Path, world: int) -> None:
    """Write a checkpoint of a layer whose heads are shared out over these ranks."""
    checkpoints.save(_sharded_layer(world, seed=0).state_dict(), checkpoint_id=folder)


def load_layer(folder: Path, world: int) -> dict[str, Tensor]:
    """The weights of the checkpoint, loaded on another number of ranks."""
    layer = _sharded_layer(world, seed=5)
    state = layer.state_dict()
    checkpoints.load(state, checkpoint_id=folder)
    layer.load_state_dict(state)
    whole = layer.state_dict().items()
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in whole}


def layer_of(seed: int) -> hw.MultiHeadAttention:
    torch.manual_seed(seed)
    return hw.MultiHeadAttention(12, 6, 6, bias=True)


def _sharded_layer(world: int, seed: int) -> nn.Module:
    layer = layer_of(seed)
    mesh = init_device_mesh("cpu", (world,))
    return shard_heads(layer, mesh)


def main(rank: int, world: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    folder, ids = Path(store).parent, texts(world)
    own = share(ids, rank)
    sharded = fully_sharded(world)
    results: dict[str, Any] = {
        "tensor parallel": tensor_parallel(folder / "model", ids),
        "ddp": monitored(DistributedDataParallel(mini_gpt()), own),
        "fsdp": monitored(sharded, own),
        "observed": table_of(mini_gpt(), own),
        "fingerprint": fingerprint(sharded),
    }
    if (folder / "layer").exists():
        results["layer"] = load_layer(folder / "layer", world)
    else:
        save_layer(folder / "layer", world)
    torch.save(results, Path(f"{store}.{rank}.pt"))
    dist.destroy_process_group()
