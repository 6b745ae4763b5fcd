"""The long part of `headwise prune`: plan, tell, cut, measure, save."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.chart import draw_curves
from headwise.cli._options import Shared
from headwise.cli._show import note, progress
from headwise.cli._work import open_model, some_texts
from headwise.curves import Curves
from headwise.gauge import prune_curves
from headwise.models import batches, encode
from headwise.scores import Scores, random_orders
from headwise.surgery import Format, costs, plan, prune, save, time_passes

_SIZE = 16
_TEXTS, _TOKENS = 8, 128


@dataclass(frozen=True)
class Order:
    """What is asked for: where the scores are, how much goes, and what is told besides."""

    by: Path
    remove: float
    uniform: bool
    timed: bool
    curve: bool
    format: Format


def cut(
    model: str, order: Order, text: Path | None, shared: Shared, out: Path, force: bool
) -> dict[str, Any]:
    """Tell what goes and what it saves, cut it out, and write the smaller model.

    Returns:
        What can be written as JSON: the heads removed, and costs before and after by name.
    """
    scores = Scores.load(order.by)
    planned = plan(scores, remove=order.remove, uniform=order.uniform)
    texts = None if text is None else some_texts(text, shared)
    opened, tokenizer = open_model(model, shared)
    counted = costs(opened)
    told: dict[str, tuple[float, ...]] = {
        f"{name} of heads": (counted.after((), name), counted.after(planned.removed, name))
        for name in counted.own
    }
    names = ", ".join(map(str, planned.removed))
    note(f"{len(planned.removed)} heads go ({planned.why}): {names}")
    read = [] if texts is None else _read(texts, opened, tokenizer, shared)
    small = prune(opened, planned, fold="mean" if read else None, reference=read)
    told["parameters"] = _numbers(opened), _numbers(small)
    if order.timed:
        told |= _times(opened, small)
    curves = _curves(opened, scores, read) if order.curve else None
    save(small, out, format=order.format, tokenizer=tokenizer, force=force)
    note("Opened again in a fresh process, it answers the same")
    if curves is not None:
        curves.frame().to_csv(out / "curves.csv", index=False)
        (out / "curves.svg").write_text(draw_curves(curves, "What is lost as heads go"), "utf-8")
    return {"removed": [str(head) for head in planned.removed], "why": planned.why, "costs": told}


def _read(texts: list[str], model: nn.Module, tokenizer: Any, shared: Shared) -> list[Any]:
    pieces = encode(tokenizer, texts, model, shared.max_tokens)
    return [vars(batch) for batch in batches(pieces, _SIZE, next(model.parameters()).device)]


def _curves(model: nn.Module, scores: Scores, read: list[Any]) -> Curves:
    """What goes by these scores loses, beside random orders."""
    orders = {scores.method: [scores.order()], "random": random_orders(scores.heads)}
    with progress("Drawing curves") as tell:
        return prune_curves(
            model, read, orders, reference=read, loss=scores.loss or None, on_step=tell
        )


def _numbers(model: nn.Module) -> float:
    return float(sum(weight.numel() for weight in model.parameters()))


def _times(*models: nn.Module) -> dict[str, tuple[float, ...]]:
    """Milliseconds of a pass over 8 texts of 128 tokens, or as many as are read, in each model."""
    config: Any = models[0].config
    longest = min(_TOKENS, getattr(config, "max_position_embeddings", _TOKENS))
    device = next(models[0].parameters()).device
    ids = torch.randint(config.vocab_size, (_TEXTS, longest), device=device)
    times = time_passes(models, {"input_ids": ids})
    return {
        "milliseconds of attention blocks": tuple(1000 * sum(one.blocks) for one in times),
        "milliseconds of a pass": tuple(1000 * one.whole for one in times),
    }
