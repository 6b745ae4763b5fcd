"""`headwise report`: a page about every head of a model, of the Mini-GPT, or of a saved study."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli._options import (
    Force,
    Shared,
    Target,
    check_folder,
    check_output,
    given_options,
    opt,
    write_output,
)
from headwise.cli._print import print_note, print_result, progress_bar
from headwise.cli._roles import find_roles_of
from headwise.cli._train import FACTS, check_mini_gpt, train_mini_gpt
from headwise.errors import ArgumentError, UnsupportedError
from headwise.files import STUDY_FILES

if TYPE_CHECKING:
    from torch import nn

    from headwise.report import Study

_LAB_FOLDER = Path("mini-gpt")
_LOSS_TO_LOSE = 0.01  # by the plan of --pruning, as a share of the full model's loss


@dataclass(frozen=True)
class Inputs:
    """Inputs of MODEL, and the analyses to run; None or False if not set."""

    text: Annotated[
        Path | None,
        opt("The texts for MODEL: a UTF-8 file with one text per line, or - for standard input."),
    ] = None
    target: Target = None
    show: Annotated[
        Path | None,
        opt(
            "Up to 48 texts whose attention the page shows, in a file like that of --text.",
            shown="the beginnings of three texts",
        ),
    ] = None
    roles: Annotated[
        bool | None,
        opt(
            "Also find the roles of the heads of MODEL.",
            "--roles/--no-roles",
            shown="yes, unless MODEL is an encoder-decoder",
        ),
    ] = None
    pruning: Annotated[
        bool,
        opt(
            "Add a section about removing heads: they are scored on half of the texts, and "
            "the loss is measured on the other half as they are removed. Takes 100 to 250 more "
            "passes over half of the texts.",
            "--pruning",
        ),
    ] = False


@dataclass(frozen=True)
class Sources:
    """Where a study comes from if no MODEL is named."""

    lab_folder: Annotated[
        Path | None,
        opt(
            "The folder of the Mini-GPT; it is trained there if the folder holds none.",
            shown=str(_LAB_FOLDER),
        ),
    ] = None
    study: Annotated[
        Path | None, opt("Instead of MODEL: write the page of the study saved in this folder.")
    ] = None


def report(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder or a name on the Hugging Face hub."),
    ] = None,
    out: Annotated[Path, opt("The page to write.", "--out", "-o")] = Path("report.html"),
    full: Annotated[
        bool, opt("Leave nothing out, even if the page exceeds 5 MB.", "--full")
    ] = False,
    save: Annotated[
        Path | None,
        opt(
            "Save the study to this folder, with statistics per text, for headwise compare "
            "and report --study."
        ),
    ] = None,
    force: Force = False,
    *,
    inputs: Inputs,
    sources: Sources,
    shared: Shared,
) -> None:
    """Study every head of a model and write a page about it.

    Without MODEL, trains a small model on a generated grammar, the Mini-GPT, and studies it.
    """
    _check(model, inputs, sources, shared)
    if sources.study is not None and save is not None:
        raise ArgumentError(
            f"report: --save {save} with --study {sources.study}, which is saved already. Leave "
            f"one of them out."
        )
    check_output(out, ".html", force=force)
    check_folder(save, *STUDY_FILES, force=force)
    study = _study(model, inputs, sources, shared, full=full, per_text=save is not None)
    for line in study.findings():
        print_result(line)
    if save is not None:
        print_note(f"The study is saved in {study.save(save, force=force)}")
    write = partial(study.report, full=full)
    print_result(f"The page is {write_output(write, out, force).resolve()}")


def _study(
    model: str | None,
    inputs: Inputs,
    sources: Sources,
    shared: Shared,
    *,
    full: bool,
    per_text: bool,
) -> "Study":
    """The saved study, that of the Mini-GPT, or that of a model on the texts of a file."""
    from headwise.report import load_study, study_lab

    if sources.study is not None:
        return load_study(sources.study)
    if model is not None and inputs.text is not None:
        return _study_of_texts(model, inputs.text, inputs, shared, full=full, per_text=per_text)
    folder = sources.lab_folder or _LAB_FOLDER
    check_mini_gpt(folder)
    if not (folder / FACTS).exists():
        print_note(
            f"No MODEL is named: a small language model is trained in the folder {folder}, which "
            f"takes a few minutes, and studied. For your own: headwise report MODEL --text FILE"
        )
    trained = train_mini_gpt(folder, {} if shared.seed is None else {"seed": shared.seed})
    with progress_bar("Studying the Mini-GPT") as on_progress:
        return study_lab(trained, per_text=per_text, on_progress=on_progress)


def _study_of_texts(
    name: str, text: Path, inputs: Inputs, shared: Shared, *, full: bool, per_text: bool
) -> "Study":
    """The study of a model, with its roles and the section about removing heads if requested."""
    from headwise.cli import _inputs
    from headwise.cli._curves import check_texts_suffice
    from headwise.models.texts import reads_two_texts
    from headwise.report import About, study
    from headwise.roles import Evidence, check_reads_one_text

    # What is wrong with texts is found fast, and opening a model is not.
    texts, targets = _inputs.read_texts_and_targets(text, inputs.target, shared)
    if inputs.pruning:
        check_texts_suffice(texts, "report: --pruning")
    shown = None if inputs.show is None else _inputs.read_text_file(inputs.show, shared)
    model, tokenizer = _inputs.open_model(name, shared, text_for="study")
    reads_two = reads_two_texts(model)
    if reads_two and inputs.pruning:
        raise UnsupportedError(
            f"report: --pruning with {type(model).__name__}, which reads two texts. Leave "
            f"--pruning out."
        )
    if reads_two and inputs.roles:
        check_reads_one_text("report", model)
    if reads_two and inputs.roles is None:
        print_note(
            f"Roles are not looked for: {type(model).__name__} reads two texts, and a role "
            f"is a relation within one text"
        )
    if not reads_two:
        _inputs.note_split_texts(texts, model, tokenizer, shared)
    source = "standard input" if text == _inputs.STANDARD_INPUT else text.name
    with progress_bar(f"Studying {name}") as on_progress:
        result = study(
            model,
            tokenizer,
            texts,
            targets=targets,
            request=_inputs.request_of(None, per_text, tokenizer),
            about=About(title=_inputs.title_of(name), source=source),
            max_tokens=shared.max_tokens,
            show=shown,
            full=full,
            on_progress=on_progress,
        )
    if inputs.roles is not False and not reads_two:
        found = find_roles_of(
            name, model, tokenizer, texts, Evidence(seed=shared.seed or 0), shared.max_tokens,
            without="--no-roles leaves the roles out, which take most of the time",
        )  # fmt: skip
        result = result.with_roles(found)
    return (
        _with_pruning(result, name, model, tokenizer, texts, shared) if inputs.pruning else result
    )


def _with_pruning(
    study: "Study", name: str, model: "nn.Module", tokenizer: Any, texts: list[str], shared: Shared
) -> "Study":
    """The study with the importance of its heads, curves, and the plan at their elbow.

    Every second text scores the heads and gives mean outputs; the others measure the curves.
    There is no plan where the first head already costs too much.
    """
    from headwise.cli._curves import QualityInputs
    from headwise.scoring import importance, read_batches
    from headwise.surgery import plan, plan_curves

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
    with progress_bar("Drawing curves") as on_progress:
        curves = plan_curves(
            model, evaluation.batches, scores, reference=reference, loss=evaluation.loss,
            random=5, on_progress=on_progress,
        )  # fmt: skip
    elbow = curves.elbow(scores.method, curves.allowance(_LOSS_TO_LOSE))
    planned = plan(scores, within=_LOSS_TO_LOSE, curves=curves) if elbow.heads else None
    return study.with_pruning(scores=scores, plan=planned, curves=curves)


def _check(model: str | None, inputs: Inputs, sources: Sources, shared: Shared) -> None:
    """Refuse options that would otherwise be ignored."""
    if model is not None and inputs.text is None:
        raise ArgumentError(f"report: {model} needs texts to read. Add --text FILE.")
    if model is not None and sources != Sources():
        option, value = next(iter(given_options(sources).items()))
        what = "the Mini-GPT" if option == "lab-folder" else "a saved study"
        raise ArgumentError(
            f"report: --{option} {value} is for {what}, not for {model}. Leave one of them out."
        )
    unused = [*given_options(inputs), *given_options(shared)]
    if model is not None or not unused:
        return
    if sources.study is not None:
        raise ArgumentError(
            f"report: --{unused[0]} is for a MODEL, and the study in {sources.study} is finished. "
            f"Leave --{unused[0]} out."
        )
    for_lab = {"seed", *(["roles"] if inputs.roles else [])}  # it has roles in any case
    for_models = [option for option in unused if option not in for_lab]
    if for_models:
        option = "no-roles" if for_models[0] == "roles" else for_models[0]
        raise ArgumentError(
            f"report: --{option} is for a MODEL, and none is named; the Mini-GPT reads lines "
            f"of its own grammar. Name a MODEL, or leave --{option} out."
        )
