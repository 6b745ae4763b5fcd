"""The long part of `headwise prune`: plan, tell, cut, measure, save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.cli._curve import curves_of, material_of, orders_of, write_curves
from headwise.cli._options import Shared
from headwise.cli._print import note, progress
from headwise.cli._progress import Texts, open_model, sentences_of, tell_pieces
from headwise.errors import ArgumentError
from headwise.models import (
    Format,
    as_format,
    batches,
    encode,
    example_input,
    save,
    source_files,
)
from headwise.recovery import recover
from headwise.scoring import read_batches
from headwise.surgery import Plan, costs, plan, prune, time_passes
from headwise.tables import Scores

_SIZE = 16
_TEXTS, _TOKENS = 8, 128


@dataclass(frozen=True)
class Order:
    """What is asked for: where the scores are, how much goes, and what is done and told besides.

    Attributes:
        recovery: What `recover` is given; it is called where there are steps.
    """

    by: Path
    beside: Sequence[Path]
    remove: float
    uniform: bool
    timed: bool
    curve: bool
    recovery: Mapping[str, Any]
    format: Format


def cut(
    model: str, order: Order, given: Texts, shared: Shared, out: Path, force: bool
) -> dict[str, Any]:
    """Tell what goes and what it saves, cut it out, and write the smaller model.

    Returns:
        What can be written as JSON: the heads removed, costs before and after by name, the elbow
        of each curve, and how far the smaller model was from the full one as it recovered.
    """
    scores = Scores.load(order.by)
    orders = orders_of(scores, [Scores.load(path) for path in order.beside])
    plan(scores, remove=order.remove, uniform=order.uniform)  # what cannot be is said at once
    opened, tokenizer = open_model(model, shared)
    source_files(model)
    counted = costs(opened)
    if scores.model != counted.model:
        raise ArgumentError(
            f"prune: the scores in {order.by} are of the model {scores.model}, and {model} is "
            f"{counted.model}. Weigh its heads anew: headwise importance."
        )
    planned = plan(scores, remove=order.remove, uniform=order.uniform, costs=counted)
    for line in str(planned).splitlines():
        note(line)
    _check_format(order.format, opened, planned, folds=bool(given))
    told: dict[str, tuple[float, ...]] = {f"{k} of heads": x for k, x in planned.costs.items()}
    texts = sentences_of(given)
    if texts:
        tell_pieces(texts, opened, tokenizer, shared)
    read = [] if not given else _read(texts, opened, tokenizer, shared)
    material = material_of(given, scores.loss, opened, tokenizer, shared) if order.curve else None
    small = prune(opened, planned, fold="mean" if read else None, reference=read)
    lost = _recover(small, opened, texts, tokenizer, order.recovery, shared)
    told["parameters"] = count_weights(opened), count_weights(small)
    if order.timed:
        told |= _times(opened, small)
    curves = (
        None if material is None
        else curves_of(opened, orders, material, order.recovery)
    )  # fmt: skip
    save(small, out, format=order.format, tokenizer=tokenizer, source=model, force=force)
    note("Opened again in a fresh process, it answers the same")
    if order.format == "padded":
        note("What is written is as large and as slow as before: zeros stand where heads were")
    return {
        "removed": [str(head) for head in planned.removed],
        "why": planned.why,
        "costs": told,
        "elbows": [] if curves is None else write_curves(curves, out),
        "recovery": lost,
    }


def _check_format(format: Format, model: nn.Module, planned: Plan, *, folds: bool) -> None:
    """Refuse a format that the smaller model will not have, before texts are read.

    Raises:
        UnsupportedError: there is no such form of it.
    """
    as_format(format, model)
    if format in ("stock", "padded"):
        # A mean over any text gives the smaller model the same weights, but for their values.
        short = [example_input(model)] if folds else None
        as_format(format, prune(model, planned, fold="mean" if folds else None, reference=short))


def _read(texts: list[str], model: nn.Module, tokenizer: Any, shared: Shared) -> list[Any]:
    pieces = encode(tokenizer, texts, model, shared.max_tokens)
    return [vars(batch) for batch in batches(pieces, _SIZE, next(model.parameters()).device)]


def _recover(
    small: nn.Module,
    full: nn.Module,
    texts: list[str],
    tokenizer: Any,
    how: Mapping[str, Any],
    shared: Shared,
) -> list[float]:
    """Recover a smaller model; how far it was from the full one at each step."""
    if not how["steps"]:
        return []
    read = read_batches(texts, full, tokenizer, shared.max_tokens)
    with progress("Recovering the smaller model") as tell:
        lost = recover(small, full, read, on_progress=tell, **how)
    note(f"It was {lost[0]:.3g} from the full model at the first step, {lost[-1]:.3g} at the last")
    return [float(one) for one in lost]


def count_weights(model: nn.Module) -> float:
    """How many numbers the weights of a model hold."""
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
