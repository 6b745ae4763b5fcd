"""One of several processes that share the heads of a layer: run by `test_tensor_parallel`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from headwise.layer import KVCache, MultiHeadAttention, RoPE
from ranks import shard_heads


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)  # the same layer and texts in every process
    layer = MultiHeadAttention(12, 4, 2, rope=RoPE(2), bias=True, gate=True).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    alone = layer(x, causal=True)
    expected = torch.autograd.grad(alone.square().sum(), [x, *layer.parameters()])

    mesh = init_device_mesh("cpu", (world,))
    shared = shard_heads(layer, mesh)
    widths = []
    hook = shared.attention.register_forward_hook(lambda _, args, out: widths.append(out.shape[1]))
    output = shared(x, causal=True)
    hook.remove()
    assert widths == [4 // world], widths  # each process computed its own heads alone
    torch.testing.assert_close(output, alone)
    grads = torch.autograd.grad(output.square().sum(), [x, *shared.parameters()])
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(whole(ours), theirs)

    with torch.no_grad():
        cache = KVCache()
        pieces = [shared(part, cache=cache, causal=True) for part in x.split([4, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), alone)
    dist.destroy_process_group()
