"""The whole way of a language model: cut at its elbow, saved and opened, its cache planned."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.surgery import costs, plan_curves

Batch = dict[str, Tensor]


def batch_of_lines(tokenizer: Any, lines: list[str]) -> Batch:
    """Lines as one batch, whose padding has no label."""
    tokenizer.padding_side = "right"
    batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
    ids, real = batch["input_ids"], batch["attention_mask"]
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


@torch.no_grad()
def loss_of(model: nn.Module, batch: Batch) -> float:
    return float(model(**batch).loss)


def whole_way(model: nn.Module, scoring: Batch, held_out: Batch) -> list[list[str]]:
    """What each step gives, in words and numbers.

    Args:
        scoring: The lines on which heads are scored, the elbow is found and the cache is planned.
        held_out: The lines of all losses.
    """
    scores = hw.importance(model, [scoring])
    curves = plan_curves(model, [scoring], scores)
    plan = hw.plan(scores, within=0.05, curves=curves, costs=costs(model))
    ids = held_out["input_ids"]
    small = hw.prune(model, plan)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        hw.save(small, Path(folder) / "small")
        cut, opened = (each(ids).logits for each in (small, hw.load(Path(folder) / "small")))
        with hw.ablate(model, plan.removed):
            ablated = model(ids).logits
    cache = hw.cache_plan(model, [scoring], keep=0.5, sinks=1, window=6)
    return [
        ["weights", f"{sum(x.numel() for x in model.parameters()):,}"],
        ["loss on held-out lines", f"{loss_of(model, held_out):.3f}"],
        ["heads removed at the elbow (within 5 %)", f"{len(plan.removed)} of {len(scores.heads)}"],
        ["loss without them", f"{loss_of(small, held_out):.3f}"],
        ["weights without them", f"{sum(x.numel() for x in small.parameters()):,}"],
        ["largest difference from the ablated model", f"{float((cut - ablated).abs().max()):.0e}"],
        ["largest difference after opening it", f"{float((cut - opened).abs().max()):.0e}"],
        ["cache plan", str(cache).partition(" (")[0]],
        ["loss with the full cache", f"{cache.measured['loss of the full cache']:.3f}"],
        ["loss with the plan", f"{cache.measured['loss of this cache']:.3f}"],
    ]
