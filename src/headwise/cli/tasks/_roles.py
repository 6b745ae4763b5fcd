"""The roles of a model's heads on texts."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from headwise._progress import Progress
from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.cli.tasks._models import open_model
from headwise.cli.tasks._relations import load_relations
from headwise.cli.tasks._texts import draw_texts
from headwise.roles import Evidence, Relations, Roles, find_roles

_SECONDS_BEFORE_NOTE = 5.0

if TYPE_CHECKING:
    from headwise.corpora import AnnotatedText


def find_model_roles(
    name: str,
    texts: list["str | AnnotatedText"],
    shared: Shared,
    nulls: tuple[str, ...] | None,
    relations: Sequence[str] = (),
) -> Roles:
    """Open a model and find the roles of its heads.

    Args:
        nulls: The nulls to test against; None is every null that the model allows.
        relations: The user's own functions and choices, as FILE.py:NAME.
    """
    evidence = Evidence(nulls, seed=shared.seed or 0)
    own = load_relations(relations, name)
    drawn = draw_texts(texts, shared)
    model, tokenizer = open_model(name, shared)
    return find_roles_of(name, model, tokenizer, drawn, evidence, shared.max_tokens, own)


def noting_time(bar: Callable[..., None], advice: str) -> Progress:
    """Progress that also notes once, with advice, how long all steps will take, if it is long."""
    start, noted = time.monotonic(), False

    def on_progress(done: int, total: int) -> None:
        nonlocal noted
        bar(done, total)
        seconds = time.monotonic() - start
        if not noted and done and seconds > _SECONDS_BEFORE_NOTE:
            noted = True
            minutes = seconds / done * total / 60
            print_note(f"{total:,} steps take about {minutes:,.1f} minutes; {advice}")

    return on_progress


def find_roles_of(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence["str | AnnotatedText"],
    evidence: Evidence,
    max_tokens: int | None,
    relations: Relations | None = None,
    *,
    without: str = "",
) -> Roles:
    """Find the roles of the heads of an open model, behind a progress bar.

    Args:
        without: How to do without the roles, which is noted with the time that they take.
    """
    label = f"Finding the roles of the heads of {name}"
    with progress_bar(label) as bar:
        on_progress = noting_time(bar, without) if without else bar
        return find_roles(
            model,
            tokenizer,
            texts,
            relations=relations,
            evidence=evidence,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
