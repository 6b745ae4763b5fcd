"""Bytes of a cache with half of the kv heads full, and its times for a token and for prefill.

Paired ratios at 8,192 tokens, CPU clock, one thread: half of the kv heads keep 4 first and 256
latest tokens, against all heads full on our kernels, and torch's kernel with the stock cache.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.cache_time --rounds 24
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import headwise as hw
from benchmarks._timing import interleaved
from headwise.caching import CachePlan

LONG = 8192


def times(rounds: int) -> dict[str, Any]:
    """Bytes, and times of a token and of prefill at 8,192 tokens, as paired ratios."""
    torch.manual_seed(0)
    n_layers, heads = 4, 8
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=n_layers, num_attention_heads=16,
        num_key_value_heads=heads, intermediate_size=1024, vocab_size=500,
        max_position_embeddings=2 * LONG,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    half = CachePlan.of(
        {layer: range(0, heads, 2) for layer in range(n_layers)},
        n_layers=n_layers, n_kv_heads=heads, sinks=4, window=256,
    )  # fmt: skip
    every = CachePlan.of(
        {layer: range(heads) for layer in range(n_layers)}, n_layers=n_layers, n_kv_heads=heads
    )
    ids = torch.randint(3, 500, (1, LONG))
    result = {"token": _token_times(model, ids, half, every, rounds)}
    print(json.dumps(result, indent=1), flush=True)
    result["prefill"] = _prefill_times(model, ids, half, every, max(3, rounds // 4))
    return result


@torch.no_grad()
def _token_times(
    model: nn.Module, ids: torch.Tensor, half: CachePlan, every: CachePlan, rounds: int
) -> dict[str, Any]:
    token = ids[:, :1]
    stock = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(input_ids=ids, cache=stock, logits_to_keep=1)
    with half.cache(model) as small, every.cache(model) as whole, every.cache(model) as short:
        for cache in (small, whole):
            model(input_ids=ids, cache=cache, logits_to_keep=1)
        model(input_ids=ids[:, :16], cache=short, logits_to_keep=1)
        nbytes = {"half": small.nbytes, "all full": whole.nbytes}

        def step(cache: Any, implementation: str) -> Callable[[], Any]:
            def work() -> None:
                model.set_attn_implementation(implementation)
                model(input_ids=token, cache=cache)

            return work

        hw.register_attention()
        works = {
            "half": step(small, "headwise"),
            "all full": step(whole, "headwise"),
            "all full, 16 tokens": step(short, "headwise"),
            "stock": step(stock, "sdpa"),
        }
        taken = interleaved(works, rounds, clock="cpu")
    stock_bytes = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
    return {
        "bytes": nbytes | {"stock": stock_bytes, "ratio": nbytes["half"] / stock_bytes},
        "milliseconds": {name: taken.median(name) for name in works},
        "half / stock": str(taken.ratio("half", "stock")),
        "half / all full": str(taken.ratio("half", "all full")),
        "16 tokens / all full": str(taken.ratio("all full, 16 tokens", "all full")),
    }


@torch.no_grad()
def _prefill_times(
    model: nn.Module, ids: torch.Tensor, half: CachePlan, every: CachePlan, rounds: int
) -> dict[str, Any]:
    def fill(plan: CachePlan | None, implementation: str) -> Callable[[], Any]:
        def work() -> None:
            model.set_attn_implementation(implementation)
            if plan is None:
                cache = DynamicCache(config=model.config)
                model(input_ids=ids, cache=cache, logits_to_keep=1)
                return
            with plan.cache(model) as cache:
                model(input_ids=ids, cache=cache, logits_to_keep=1)

        return work

    works = {
        "half": fill(half, "headwise"),
        "all full": fill(every, "headwise"),
        "stock": fill(None, "sdpa"),
    }
    taken = interleaved(works, rounds, clock="cpu")
    return {
        "milliseconds": {name: taken.median(name) for name in works},
        "half / stock": str(taken.ratio("half", "stock")),
        "half / all full": str(taken.ratio("half", "all full")),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="of a token; a quarter for prefill")
    print(json.dumps(times(parser.parse_args().rounds), indent=1), flush=True)


if __name__ == "__main__":
    main()
