"""The study of a model on the texts of a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headwise.cli._options import Shared
from headwise.cli._print import print_note, progress_bar
from headwise.cli.tasks._curves import check_texts_suffice
from headwise.cli.tasks._models import open_model, title_of
from headwise.cli.tasks._pruning_section import with_pruning
from headwise.cli.tasks._roles import find_roles_of
from headwise.cli.tasks._texts import (
    STANDARD_INPUT,
    note_split_texts,
    read_sentence,
    read_text_file,
    read_texts_and_targets,
)
from headwise.errors import UnsupportedError
from headwise.models.texts import (
    TOKEN_CLASSES,
    reads_two_texts,
    token_classes,
)
from headwise.report import About, Look, Study, look, study
from headwise.roles import Evidence, check_reads_one_text
from headwise.watch import DEFAULT, Request


@dataclass(frozen=True)
class RequestedStatistics:
    """The statistics that a command asks for by name; None is all that are cheap."""

    names: list[str] | None = None
    per_text: bool = False

    def check(self) -> None:
        """Refuse names that no model has, before a model is opened."""
        if self.names is not None:
            Request.of(self.names, classes=dict.fromkeys(TOKEN_CLASSES, ()))

    def request(self, tokenizer: Any) -> Request | None:
        """The request for a model's tokenizer, including the token classes of its vocabulary."""
        if self == RequestedStatistics():
            return None
        classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
        names = (*DEFAULT, *classes) if self.names is None else self.names
        return Request.of(names, self.per_text, classes)


@dataclass(frozen=True)
class Shown:
    """What a page shows beside the statistics.

    Attributes:
        file: A file of texts to show; None shows a few of the studied texts.
        full: Whether nothing is left out to keep the page small.
    """

    file: Path | None = None
    full: bool = False


def study_model(
    name: str,
    text: Path,
    shared: Shared,
    statistics: RequestedStatistics | None = None,
    *,
    target: Path | None = None,
    roles: bool | None = False,
    pruning: bool = False,
    show: Shown | None = None,
) -> Study:
    """Study a model on the texts of a file, with the roles of its heads if requested.

    Args:
        target: A second file with an encoder-decoder's target for each line of the first; None
            takes each text as its own target.
        roles: Whether to find roles; None finds them unless the model reads two texts.
        pruning: Whether to score the heads and draw curves, too.
        show: The texts whose attention the page shows.
    """
    # The texts first: reading them is fast, opening a model is not.
    texts, targets = read_texts_and_targets(text, target, shared)
    if pruning:
        check_texts_suffice(texts, "report: --pruning")
    show = show or Shown()
    shown = None if show.file is None else read_text_file(show.file, shared)
    model, tokenizer = open_model(name, shared, text_for="study")
    if not reads_two_texts(model):
        note_split_texts(texts, model, tokenizer, shared)
    roles = _finds_roles(model, roles, pruning)
    with progress_bar(f"Studying {name}") as on_progress:
        result = study(
            model,
            tokenizer,
            texts,
            targets=targets,
            request=(statistics or RequestedStatistics()).request(tokenizer),
            about=About(title=title_of(name), source=_source(text)),
            max_tokens=shared.max_tokens,
            show=shown,
            full=show.full,
            on_progress=on_progress,
        )
    if roles:
        evidence = Evidence(seed=shared.seed or 0)
        result = result.with_roles(
            find_roles_of(
                name,
                model,
                tokenizer,
                texts,
                evidence,
                shared.max_tokens,
                without="--no-roles leaves the roles out, which take most of the time",
            )
        )
    return with_pruning(result, name, model, tokenizer, texts, shared) if pruning else result


def _source(text: Path) -> str:
    return "standard input" if text == STANDARD_INPUT else text.name


def look_at_text(name: str, text: str, target: str | None, shared: Shared) -> Look:
    """Open a model and look at one text, or at standard input for `-`."""
    text = read_sentence(text)
    model, tokenizer = open_model(name, shared, text_for="look")
    return look(model, tokenizer, text, target=target, title=title_of(name))


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
