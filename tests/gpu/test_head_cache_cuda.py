"""A cache with a plan on a GPU gives what it gives on a CPU, whose laws are tested there."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.caching import CachePlan, LayerCachePlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
PLAN = CachePlan((LayerCachePlan(0, (None, 5)), LayerCachePlan(1, (3, 5))), sinks=2)
FULL = CachePlan((LayerCachePlan(0, (None, None)), LayerCachePlan(1, (None, None))))
LENGTH = 19


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, vocab_size=29, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def texts(padding: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 29, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": real}


@torch.no_grad()
def in_pieces(model: nn.Module, pieces: list[int], padding: int) -> Tensor:
    batch, device = texts(padding), model.device
    logits, stop = [], 0
    with PLAN.cache(model) as cache:
        for piece in pieces:
            start, stop = stop, stop + piece
            output = model(
                input_ids=batch["input_ids"][:, start:stop].to(device),
                attention_mask=batch["attention_mask"][:, :stop].to(device),
                cache=cache,
            )
            logits.append(output.logits.cpu())
    return torch.cat(logits, 1)[batch["attention_mask"].bool()]


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("pieces", [[LENGTH], [8, 6, 5], [1] * LENGTH, [9, 1, 1, 1, 5, 1, 1]])
def test_it_equals_the_cpu(pieces: list[int], padding: int) -> None:
    expected = in_pieces(llama(), pieces, padding)
    actual = in_pieces(llama().cuda(), pieces, padding)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_all_heads_full_equals_the_stock_cache(how: dict[str, Any]) -> None:
    model = llama().cuda()
    batch = {name: x.cuda() for name, x in texts(4).items()}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | how
    stock = model.generate(**batch, **options)
    with FULL.cache(model) as cache:
        assert torch.equal(model.generate(**batch, **options, cache=cache), stock)


def test_memory_is_really_freed() -> None:
    model, ids = llama().cuda(), torch.randint(3, 29, (1, 4000)).cuda()
    with torch.no_grad(), PLAN.cache(model) as small, FULL.cache(model) as full:
        model(input_ids=ids, cache=small)
        model(input_ids=ids, cache=full)
    assert small.nbytes < 0.27 * full.nbytes
