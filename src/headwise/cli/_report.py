"""`headwise report`: a page about every head of a model, of the Mini-GPT, or of a saved study."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli import _options
from headwise.cli._effects import note_few_examples
from headwise.cli._options import opt
from headwise.cli._print import print_note, print_result, progress_bar
from headwise.cli._roles import find_roles_of
from headwise.cli._train import FACTS, check_mini_gpt, train_mini_gpt
from headwise.errors import ArgumentError, UnsupportedError
from headwise.files import STUDY_FILES, write_beside

if TYPE_CHECKING:
    from torch import nn

    from headwise.report import Study

_LAB_FOLDER = Path("mini-gpt")
_LOSS_TO_LOSE = 0.01  # by the plan of --pruning, as a share of the full model's loss


def report(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A folder, a GGUF file, or a name on the Hugging Face hub."
        ),
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
    force: _options.Force = False,
    text: Annotated[
        Path | None,
        opt("The texts for MODEL: a UTF-8 file with one text per line, or - for standard input."),
    ] = None,
    target: _options.Target = None,
    show: Annotated[
        Path | None,
        opt(
            "Up to 48 texts whose attention the page shows, in a file like that of --text.",
            shown="the beginnings of three texts",
        ),
    ] = None,
    roles: Annotated[
        bool | None,
        opt(
            "Also find the roles of the heads of MODEL, which takes most of the time.",
            "--roles/--no-roles",
            shown="yes, unless MODEL is an encoder-decoder",
        ),
    ] = None,
    pruning: Annotated[
        bool,
        opt(
            "Add a section about removing heads: they are scored on half of the texts, and "
            "the loss is measured on the other half as they are removed. Takes 100 to 250 more "
            "passes over half of the texts.",
            "--pruning",
        ),
    ] = False,
    examples: Annotated[
        Path | None,
        opt(
            "Add a section about which heads write an answer, measured on these JSON lines, as "
            "headwise effects reads them. Takes a pass over half of them for each head."
        ),
    ] = None,
    lab_folder: Annotated[
        Path | None,
        opt(
            "The folder of the Mini-GPT; it is trained there if the folder holds none.",
            shown=str(_LAB_FOLDER),
        ),
    ] = None,
    saved: Annotated[
        Path | None,
        opt("Instead of MODEL: write the page of the study saved in this folder.", "--study"),
    ] = None,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    max_texts: _options.MaxTexts = None,
    max_tokens: _options.MaxTokens = None,
    paragraphs: _options.Paragraphs = None,
) -> None:
    """Study every head of a model and write a page about it.

    Without MODEL, trains a small model on a generated grammar, the Mini-GPT, and studies it.
    """
    given = _options.given_options(
        text=text, target=target, show=show, roles=roles, pruning=pruning or None,
        examples=examples, device=device, dtype=dtype, attention=attention, seed=seed,
        max_texts=max_texts, max_tokens=max_tokens, paragraphs=paragraphs,
    )  # fmt: skip
    _check(model, text, lab_folder, saved, given, roles)
    if saved is not None and save is not None:
        raise ArgumentError(
            f"report: --save {save} with --study {saved}, which is saved already. Leave one of "
            f"them out."
        )
    _options.check_output(out, ".html", force=force)
    _options.check_folder(save, *STUDY_FILES, force=force)
    from headwise import head_effects
    from headwise.cli import _inputs
    from headwise.cli._curves import check_texts_suffice
    from headwise.corpora import read_answers
    from headwise.models.texts import reads_two_texts
    from headwise.report import About, load_study, study
    from headwise.roles import Evidence, check_reads_one_text

    per_text = save is not None
    if saved is not None:
        result = load_study(saved)
    elif model is None or text is None:
        result = _study_of_mini_gpt(lab_folder or _LAB_FOLDER, seed, per_text)
    else:
        # What is wrong with texts is found fast, and opening a model is not.
        texts, targets = _inputs.read_texts_and_targets(text, target, seed, max_texts, paragraphs)
        answers = None if examples is None else read_answers(examples)
        if pruning:
            check_texts_suffice(texts, "report: --pruning")
        shown = None if show is None else _inputs.read_text_file(show, paragraphs)
        opened, tokenizer = _inputs.open_model(model, device, dtype, attention, text_for="study")
        kind, reads_two = type(opened).__name__, reads_two_texts(opened)
        for option, is_given in (("pruning", pruning), ("examples", examples is not None)):
            if reads_two and is_given:
                raise UnsupportedError(
                    f"report: --{option} with {kind}, which reads two texts. Leave --{option} out."
                )
        if reads_two and roles:
            check_reads_one_text("report", opened)
        if reads_two and roles is None:
            print_note(
                f"Roles are not looked for: {kind} reads two texts, and a role is a relation "
                f"within one text"
            )
        if not reads_two:
            _inputs.note_split_texts(texts, opened, tokenizer, max_tokens)
        effects = None
        if answers is not None:
            note_few_examples(answers)
            with progress_bar(f"Measuring the effects of the heads of {model}") as on_progress:
                effects = head_effects.effects(
                    opened, answers, tokenizer=tokenizer, seed=seed or 0, on_progress=on_progress
                )
        source = "standard input" if text == _inputs.STANDARD_INPUT else text.name
        with progress_bar(f"Studying {model}") as on_progress:
            result = study(
                opened,
                texts,
                tokenizer=tokenizer,
                targets=targets,
                request=_inputs.request_of(None, True, tokenizer) if per_text else None,
                about=About(title=_inputs.title_of(model), source=source),
                max_tokens=max_tokens,
                show=shown,
                full=full,
                on_progress=on_progress,
            )
        if roles is not False and not reads_two:
            found = find_roles_of(
                model, opened, tokenizer, texts, Evidence(seed=seed or 0), max_tokens
            )
            result = result.with_roles(found)
        if effects is not None:
            result = result.with_effects(effects)
        if pruning:
            result = _with_pruning(result, model, opened, tokenizer, texts, max_tokens)
    for line in result.findings():
        print_result(line)
    if save is not None:
        print_note(f"The study is saved in {result.save(save, force=force)}")
    with write_beside(out, force) as beside:
        result.report(beside, full=full)
    print_result(f"The page is {out.resolve()}")


def _study_of_mini_gpt(folder: Path, seed: int | None, per_text: bool) -> "Study":
    """The study of the Mini-GPT of a folder, which is trained there if the folder holds none."""
    from headwise.report import study_lab

    check_mini_gpt(folder)
    if not (folder / FACTS).exists():
        print_note(
            f"No MODEL is named: a small language model is trained in the folder {folder}, which "
            f"takes a few minutes, and studied. For your own: headwise report MODEL --text FILE"
        )
    trained = train_mini_gpt(folder, {} if seed is None else {"seed": seed})
    with progress_bar("Studying the Mini-GPT") as on_progress:
        return study_lab(trained, per_text=per_text, on_progress=on_progress)


def _with_pruning(
    study: "Study",
    name: str,
    model: "nn.Module",
    tokenizer: Any,
    texts: list[str],
    max_tokens: int | None,
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
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
    reference = read_batches(texts[::2], model, tokenizer, max_tokens)
    evaluation = QualityInputs.of(texts[1::2], scores.loss, model, tokenizer, max_tokens)
    with progress_bar("Drawing curves") as on_progress:
        curves = plan_curves(
            model, evaluation.batches, scores, reference=reference, loss=evaluation.loss,
            random=5, on_progress=on_progress,
        )  # fmt: skip
    elbow = curves.elbow(scores.method, curves.allowance(_LOSS_TO_LOSE))
    planned = plan(scores, within=_LOSS_TO_LOSE, curves=curves) if elbow.heads else None
    return study.with_pruning(scores=scores, plan=planned, curves=curves)


def _check(
    model: str | None,
    text: Path | None,
    lab_folder: Path | None,
    saved: Path | None,
    given: list[str],
    roles: bool | None,
) -> None:
    """Refuse options that would otherwise be ignored.

    Args:
        given: The options of a MODEL that are set.
    """
    if model is not None and text is None:
        raise ArgumentError(f"report: {model} needs texts to read. Add --text FILE.")
    for option, folder, what in (
        ("lab-folder", lab_folder, "the Mini-GPT"),
        ("study", saved, "a saved study"),
    ):
        if model is not None and folder is not None:
            raise ArgumentError(
                f"report: --{option} {folder} is for {what}, not for {model}. Leave one of them "
                f"out."
            )
    if model is not None or not given:
        return
    if saved is not None:
        raise ArgumentError(
            f"report: --{given[0]} is for a MODEL, and the study in {saved} is finished. "
            f"Leave --{given[0]} out."
        )
    for_lab = {"seed", *(["roles"] if roles else [])}  # it has roles in any case
    for_models = [option for option in given if option not in for_lab]
    if for_models:
        option = "no-roles" if for_models[0] == "roles" else for_models[0]
        raise ArgumentError(
            f"report: --{option} is for a MODEL, and none is named; the Mini-GPT reads lines "
            f"of its own grammar. Name a MODEL, or leave --{option} out."
        )
