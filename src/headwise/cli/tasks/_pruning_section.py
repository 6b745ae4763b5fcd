"""What the page of a study says about removing heads: scores, curves, and a plan."""

from contextlib import suppress
from typing import Any

from torch import nn

from headwise.cli._options import Shared
from headwise.cli._print import progress_bar
from headwise.cli.tasks._curves import curve_inputs, curves_of
from headwise.cli.tasks._quality import share_at_elbow
from headwise.errors import ArgumentError
from headwise.report import Study
from headwise.scoring import importance
from headwise.surgery import plan


def with_pruning(
    study: Study, name: str, model: nn.Module, tokenizer: Any, texts: list[str], shared: Shared
) -> Study:
    """The study with the importance of its heads, curves, and the plan at their elbow.

    Every second text scores the heads and gives mean outputs; the others measure the curves.
    There is no plan where the first head already costs too much.
    """
    scored = texts[::2]
    with progress_bar(f"Scoring the heads of {name}") as on_progress:
        scores = importance(
            model, scored, tokenizer=tokenizer, max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )  # fmt: skip
    inputs = curve_inputs(texts, scores.loss, model, tokenizer, shared)
    (curves,) = curves_of(model, {scores.method: scores.order()}, inputs, {"steps": 0})
    share = share_at_elbow(curves, scores.method)
    planned = None
    if share:
        # Heads that share a kv head go together, and the elbow may be below one group of them.
        with suppress(ArgumentError):
            planned = plan(scores, remove=share)
    return study.with_pruning(scores=scores, plan=planned, curves=curves)
