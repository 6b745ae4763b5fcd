"""Weights that are spread over several processes, as FSDP2 and tensor parallelism do."""

import sys
from typing import Any

from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    """Whether it is a distributed tensor, of which this process holds a part."""
    # Importing the module takes a while, and no tensor is of its type before.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def whole_tensor(value: Tensor) -> Tensor:
    """Gather a distributed tensor; a collective call that every process of its mesh must make."""
    sharded: Any = value
    return sharded.full_tensor() if is_sharded(value) else value


def first_head_of(module: nn.Module, n_heads: int) -> int:
    """The number of the first head that this process computes, of a module of Transformers.

    Under tensor parallelism the rows of the query projection are shared out in equal parts. FSDP2
    gathers weights before a module is called, so that they are no distributed tensors then.
    """
    heads = getattr(getattr(module, "config", None), "num_attention_heads", n_heads)
    if heads == n_heads:
        return 0
    for name, weight in module.named_parameters():
        if is_sharded(weight) and ("q_proj" in name or "query" in name):
            part: Any = weight
            mesh, places = part.device_mesh, part.placements
            for dim, place in enumerate(places):
                if place.is_shard(0) and n_heads * mesh.size(dim) == heads:
                    return int(mesh.get_local_rank(dim)) * n_heads
    return 0
