"""One of two processes that train a model while it is watched; run by `test_tensor_parallel`."""

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headwise.tables import HeadTable
from headwise.watch import observe

IDS = torch.tensor([[5, 9, 7, 3, 11], [4, 6, 0, 0, 0], [10, 3, 3, 12, 0], [1, 2, 3, 4, 5]])
MASK = (IDS > 0).long()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=32, vocab_size=13,
        )
    )  # fmt: skip


class EmbeddedHandwrittenAttention(nn.Module):
    """Attention implemented by hand, so that it is captured through the function mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(13, 12), nn.Linear(12, 36)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        q, k, v = self.qkv(self.embed(input_ids)).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        hidden = attention_mask[:, None, None] == 0
        weights = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return ((weights @ v).transpose(1, 2).flatten(2),)


def step(model: nn.Module, rows: slice) -> list[Tensor]:
    model.zero_grad()
    out = model(input_ids=IDS[rows], attention_mask=MASK[rows])[0]
    (out * MASK[rows][..., None]).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def gathered(table: HeadTable, world: int) -> HeadTable:
    tables: list[HeadTable] = [table] * world
    dist.all_gather_object(tables, table)
    return tables[0] + tables[1]


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    rows = slice(2 * rank, 2 * rank + 2)
    for make in (llama, EmbeddedHandwrittenAttention):
        model = DistributedDataParallel(make())
        plain = step(model, rows)
        with observe(model) as watch:
            watched = step(model, rows)
        assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
        whole = make()
        with observe(whole) as alone:
            step(whole, slice(0, 4))
        table, known = gathered(watch.table(), world), alone.table()
        assert table.heads == known.heads
        for name in known.statistics:
            np.testing.assert_array_equal(table.count(name), known.count(name))
            np.testing.assert_allclose(table.mean(name), known.mean(name), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
