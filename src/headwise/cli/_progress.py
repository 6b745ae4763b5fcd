"""The long parts that commands share: the study of a model, a Mini-GPT in its folder.

Everything heavy is imported here, so commands import this file when they run.
"""

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headwise._display import counted
from headwise.cli._options import Shared
from headwise.cli._print import note, progress
from headwise.corpora import SentencePair, read_pairs, read_parallel, read_texts
from headwise.errors import ArgumentError
from headwise.files import build_from, read_object
from headwise.lab import Trained, TrainSettings, sample, train
from headwise.models import (
    TOKEN_CLASSES,
    check_reads_text,
    encode,
    load,
    load_tokenizer,
    reads_two_texts,
    token_classes,
)
from headwise.report import About, Study, study, study_lab
from headwise.roles import Evidence, check_reads_one_text, find_roles
from headwise.scoring import RESUMABLE, importance
from headwise.tables import Scores
from headwise.watch import DEFAULT, Request

__all__ = [
    "SETTINGS",
    "Asked",
    "Texts",
    "given_in",
    "open_model",
    "sample",
    "score_model",
    "sentences_of",
    "some_of",
    "some_texts",
    "study_mini_gpt",
    "study_model",
    "tell_pieces",
    "trained_in",
]

Text = TypeVar("Text")
Texts = list[str] | list[SentencePair]

SETTINGS = {field.name for field in fields(TrainSettings)}

# What `train` leaves in its folder: the checkpoint while it runs, the facts when it has ended.
_CHECKPOINT, _FACTS = "training.safetensors", "training.json"


@dataclass(frozen=True)
class Asked:
    """The statistics that are asked for by name; None is all that are cheap."""

    names: list[str] | None = None
    per_text: bool = False

    def check(self) -> None:
        """Refuse a name that no model has, before one is opened."""
        if self.names is not None:
            Request.of(self.names, classes=dict.fromkeys(TOKEN_CLASSES, ()))

    def of(self, tokenizer: Any) -> Request | None:
        """What to find out, the classes of tokens that a vocabulary has among it."""
        if self == Asked():
            return None
        classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
        names = (*DEFAULT, *classes) if self.names is None else self.names
        return Request.of(names, self.per_text, classes)


def study_model(
    model: str,
    text: Path,
    shared: Shared,
    asked: Asked | None = None,
    *,
    target: Path | None = None,
    roles: bool | None = False,
) -> Study:
    """Watch a model on the texts of a file, and look for what its heads do there.

    Args:
        target: Another file, line by line what an encoder-decoder should write; None takes each
            text as its own target.
        roles: Whether to look for roles; None looks where the model reads one text.
    """
    # The text first: it is read in no time, a model is not.
    texts, targets = _texts_in(text, target, shared)
    opened, tokenizer = open_model(model, shared, text_for="study")
    if reads_two_texts(opened):
        if roles is None:
            note(
                f"Roles are not looked for: {type(opened).__name__} reads two texts, and a role "
                f"is a relation within one"
            )
    else:
        tell_pieces(texts, opened, tokenizer, shared)
    roles = not reads_two_texts(opened) if roles is None else roles
    if roles:
        check_reads_one_text("report", opened)
    about = About(title=_title(model), source=text.name)
    with progress(f"Studying {model}") as tell:
        seen = study(
            opened,
            tokenizer,
            texts,
            targets=targets,
            request=(asked or Asked()).of(tokenizer),
            about=about,
            max_tokens=shared.max_tokens,
            on_progress=tell,
        )
    if not roles:
        return seen
    with progress(f"Finding out what the heads of {model} do") as tell:
        found = find_roles(
            opened,
            tokenizer,
            texts,
            max_tokens=shared.max_tokens,
            evidence=Evidence(seed=shared.seed or 0),
            on_progress=tell,
        )
    return seen.with_roles(found)


def _texts_in(
    text: Path, target: Path | None, shared: Shared
) -> tuple[list[str], list[str] | None]:
    """The texts of a file, or the pairs of two, or some of them."""
    if target is None:
        return some_texts(text, shared), None
    pairs = some_of(read_parallel(text, target), shared)
    return [source for source, _ in pairs], [wanted for _, wanted in pairs]


def given_in(text: Path | None, pairs: Path | None, shared: Shared) -> Texts:
    """The texts of a file, or the pairs of another, or some of them; none without a file."""
    if pairs is not None:
        return some_of(read_pairs(pairs), shared)
    return [] if text is None else some_texts(text, shared)


def sentences_of(given: Texts) -> list[str]:
    """Texts as they are; each sentence of pairs once."""
    texts = [one for one in given if isinstance(one, str)]
    pairs = [one for one in given if isinstance(one, SentencePair)]
    return texts + list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.two)))


def score_model(
    model: str, text: Path, shared: Shared, *, pairs: bool, out: Path | None, **how: Any
) -> Scores:
    """Weigh the heads of a model on the texts of a file, or on the sentences of its pairs.

    Args:
        out: Where the scores will go; what an ablation found so far is kept beside it.
    """
    given = sentences_of(read_pairs(text)) if pairs else read_texts(text)
    texts = some_of(given, shared)
    opened, tokenizer = open_model(model, shared)
    tell_pieces(texts, opened, tokenizer, shared)
    part = None
    if out is not None and how["method"] in RESUMABLE:
        part = out.with_name(f"{out.name}.part")
        if part.exists():
            note(f"Going on from what {part} holds")
    how |= {"tokenizer": tokenizer, "max_tokens": shared.max_tokens, "resume": part}
    try:
        with progress(f"Weighing the heads of {model}") as tell:
            return importance(opened, texts, on_progress=tell, **how)
    except KeyboardInterrupt:
        if part is not None and part.exists():
            note(f"The same command goes on from what {part} holds.")
        raise


def study_mini_gpt(folder: Path, given: Mapping[str, Any]) -> Study:
    """Study the Mini-GPT of a folder, trained first if need be."""
    trained = trained_in(folder, given)
    with progress("Studying the Mini-GPT") as tell:
        return study_lab(trained, on_progress=tell)


def trained_in(folder: Path, given: Mapping[str, Any]) -> Trained:
    """Train the Mini-GPT of a folder, go on where it was interrupted, or take it as it is.

    Args:
        given: Settings by name. The others are those of the run that has ended in the folder,
            or the defaults.
    Raises:
        ArgumentError: the folder holds a model of other origin.
    """
    settings = replace(_settings_in(folder) or TrainSettings(), **given)
    _check_ours(folder)
    ended = (folder / _FACTS).exists()
    resumed = (folder / _CHECKPOINT).exists()
    what = f"{'Going on with the' if resumed else 'Training a'} Mini-GPT in {folder}"
    try:
        with progress(what) as tell:
            trained = train(
                settings,
                folder,
                on_progress=lambda step, steps, loss: tell(step, steps, f"loss {loss:.2f}"),
            )
    except KeyboardInterrupt:
        note(f"The same command goes on from the last checkpoint in {folder}.")
        raise
    if ended:
        note(f"The Mini-GPT in {folder} is trained: taking it as it is")
    return trained


def _check_ours(folder: Path) -> None:
    """Refuse to train over a model of other origin."""
    # What a killed process left half-written is hidden, and swept at the next write.
    weights = [path for path in folder.glob("*.safetensors") if not path.name.startswith(".")]
    theirs = [*weights, *folder.glob("config.json")]
    if theirs and not (folder / _CHECKPOINT).exists():
        raise ArgumentError(
            f"train: {folder} holds {theirs[0].name}, which would be overwritten, and no run of "
            f"this command. Train into another folder."
        )


def _settings_in(folder: Path) -> TrainSettings | None:
    """The settings of the run that has ended in a folder."""
    path = folder / _FACTS
    if not path.exists():
        return None
    advice = "Train into another folder."
    facts = read_object(path, "train", advice)
    problem = f"train: the settings in {path} cannot be read"
    return build_from(lambda: TrainSettings(**facts["settings"]), problem, advice)


def open_model(model: str, shared: Shared, text_for: str | None = None) -> tuple[nn.Module, Any]:
    """The model where it shall run, and its tokenizer.

    Args:
        text_for: What it must read text for; others have no tokenizer, or one for their labels.
    """
    device = _device(shared.device or "cpu")
    dtype = None if shared.dtype is None else getattr(torch, shared.dtype)
    opened = load(model, device=device, dtype=dtype)
    if text_for is not None:
        check_reads_text(text_for, opened)
    return opened, load_tokenizer(model)


def tell_pieces(texts: list[str], model: nn.Module, tokenizer: Any, shared: Shared) -> None:
    """Say so where texts are longer than what is read at once."""
    pieces = encode(tokenizer, texts, model, shared.max_tokens)
    if len(pieces) > len(texts):
        longest = max(map(len, pieces))
        note(
            f"Long texts are cut: {counted(len(texts), 'text')} in {counted(len(pieces), 'piece')} "
            f"of at most {longest} tokens"
        )


def some_texts(text: Path, shared: Shared) -> list[str]:
    """The texts of a file, or some of them."""
    return some_of(read_texts(text), shared)


def some_of(texts: list[Text], shared: Shared) -> list[Text]:
    """All texts, or some of them, in the order of the file."""
    if shared.max_texts is None or shared.max_texts >= len(texts):
        return texts
    # Not the first ones: the beginning of a file is seldom like the rest of it.
    drawn = random.Random(shared.seed or 0).sample(range(len(texts)), shared.max_texts)
    return [texts[at] for at in sorted(drawn)]


def _title(model: str) -> str:
    """A hub name as it is; of a folder two names, since many are called `hf` or `model`."""
    place = Path(model)
    return str(Path(*place.resolve().parts[-2:])) if place.is_dir() else model


def _device(name: str) -> torch.device:
    """The device, once something could be put on it and read from there."""
    try:
        with warnings.catch_warnings():  # names that are going out of use
            warnings.simplefilter("ignore")
            there = torch.zeros(1, device=name)
            there.cpu()  # which the meta device cannot
            return there.device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ArgumentError(
            f"--device: {name!r} cannot be used here ({reason}). Leave it out for the CPU."
        ) from error
