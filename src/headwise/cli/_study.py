"""The study of a model on the texts of a file: what `observe`, `roles` and `report` share."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from headwise._display import counted
from headwise.cli import _inputs
from headwise.cli._curves import QualityInputs, check_texts_suffice, curves_of, share_at_elbow
from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.corpora import AnnotatedText
from headwise.errors import UnsupportedError
from headwise.models.texts import reads_two_texts
from headwise.report import About, Study, study
from headwise.roles import (
    FEWEST_TEXTS,
    Evidence,
    Relations,
    Roles,
    check_reads_one_text,
    find_roles,
)
from headwise.scoring import importance, read_batches
from headwise.surgery import plan, removal_order

_SECONDS_BEFORE_NOTE = 5.0


def study_model(
    name: str,
    text: Path,
    shared: Shared,
    *,
    target: Path | None = None,
    statistics: str | None = None,
    per_text: bool = False,
    roles: bool | None = False,
    pruning: bool = False,
    show: Path | None = None,
    full: bool = False,
) -> Study:
    """Study a model on the texts of a file, with the roles of its heads if requested.

    Args:
        target: A second file with an encoder-decoder's target for each line of the first; None
            takes each text as its own target.
        statistics: Names of statistics, separated by commas; None is all that are cheap.
        roles: Whether to find roles; None finds them unless the model reads two texts.
        pruning: Whether to score the heads and draw curves, too.
        show: A file of texts to show; None shows a few of the studied texts.
        full: Whether nothing is left out to keep the page small.
    """
    # What is wrong with names or texts is found fast, and opening a model is not.
    _inputs.check_statistics(statistics)
    texts, targets = _inputs.read_texts_and_targets(text, target, shared)
    if pruning:
        check_texts_suffice(texts, "report: --pruning")
    shown = None if show is None else _inputs.read_text_file(show, shared)
    model, tokenizer = _inputs.open_model(name, shared, text_for="study")
    if not reads_two_texts(model):
        _inputs.note_split_texts(texts, model, tokenizer, shared)
    roles = _finds_roles(model, roles, pruning)
    source = "standard input" if text == _inputs.STANDARD_INPUT else text.name
    with progress_bar(f"Studying {name}") as on_progress:
        result = study(
            model,
            tokenizer,
            texts,
            targets=targets,
            request=_inputs.request_of(statistics, per_text, tokenizer),
            about=About(title=_inputs.title_of(name), source=source),
            max_tokens=shared.max_tokens,
            show=shown,
            full=full,
            on_progress=on_progress,
        )
    if roles:
        evidence = Evidence(seed=shared.seed or 0)
        without = "--no-roles leaves the roles out, which take most of the time"
        found = find_roles_of(
            name, model, tokenizer, texts, evidence, shared.max_tokens, without=without
        )
        result = result.with_roles(found)
    return _with_pruning(result, name, model, tokenizer, texts, shared) if pruning else result


def _finds_roles(model: nn.Module, roles: bool | None, pruning: bool) -> bool:
    """Whether roles are looked for: by default only in models that read one text.

    Raises:
        UnsupportedError: the model reads two texts, and roles or pruning were asked for.
    """
    if not reads_two_texts(model):
        return roles is not False
    if pruning:
        raise UnsupportedError(
            f"report: --pruning with {type(model).__name__}, which reads two texts. Leave "
            f"--pruning out."
        )
    if roles:
        check_reads_one_text("report", model)
    if roles is None:
        print_note(
            f"Roles are not looked for: {type(model).__name__} reads two texts, and a role "
            f"is a relation within one text"
        )
    return False


def find_roles_of(
    name: str,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | AnnotatedText],
    evidence: Evidence,
    max_tokens: int | None,
    relations: Relations | None = None,
    *,
    without: str = "",
) -> Roles:
    """Find the roles of the heads of an open model, behind a progress bar.

    Args:
        without: How to do without the roles; it is noted, with the time that they take, once that
            turns out to be long.
    """
    if len(texts) // 2 < FEWEST_TEXTS:
        print_note(
            f"Of {counted(len(texts), 'text')} no role of text can be tested, only roles on "
            f"sequences of random tokens: give {2 * FEWEST_TEXTS} distinct texts or more"
        )
    start, noted = time.monotonic(), not without
    with progress_bar(f"Finding the roles of the heads of {name}") as bar:

        def on_progress(done: int, total: int) -> None:
            nonlocal noted
            bar(done, total)
            seconds = time.monotonic() - start
            if not noted and done and seconds > _SECONDS_BEFORE_NOTE:
                noted = True
                minutes = seconds / done * total / 60
                print_note(f"{total:,} steps take about {minutes:,.1f} minutes; {without}")

        return find_roles(
            model,
            tokenizer,
            texts,
            relations=relations,
            evidence=evidence,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )


def _with_pruning(
    study: Study, name: str, model: nn.Module, tokenizer: Any, texts: list[str], shared: Shared
) -> Study:
    """The study with the importance of its heads, curves, and the plan at their elbow.

    Every second text scores the heads and gives mean outputs; the others measure the curves.
    There is no plan where the first head already costs too much.
    """
    with progress_bar(f"Scoring the heads of {name}") as on_progress:
        scores = importance(
            model,
            texts[::2],
            tokenizer=tokenizer,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )
    reference = read_batches(texts[::2], model, tokenizer, shared.max_tokens)
    evaluation = QualityInputs.of(texts[1::2], scores.loss, model, tokenizer, shared)
    order, ends = removal_order(scores)
    orders = {scores.method: order}
    (curves,) = curves_of(model, orders, ends, reference, evaluation, {"steps": 0})
    share = share_at_elbow(curves)
    planned = plan(scores, remove=share) if share else None
    return study.with_pruning(scores=scores, plan=planned, curves=curves)
