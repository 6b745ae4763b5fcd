"""`headwise report`: study a model's heads, or train the Mini-GPT and study its, as a page."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Shared, Target, check_output
from headwise.cli._print import say
from headwise.errors import ArgumentError

_LAB = Path("mini-gpt")


def report(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder, or a name on the Hugging Face hub."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="What MODEL reads: a UTF-8 file, a text a paragraph.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    lab_folder: Annotated[
        Path | None,
        typer.Option(help="Where the Mini-GPT is, or will be trained.", show_default=str(_LAB)),
    ] = None,
    roles: Annotated[
        bool | None,
        typer.Option(
            "--roles/--no-roles",
            help="Look for what each head of MODEL does, too.",
            show_default="where MODEL reads one text",
        ),
    ] = None,
    target: Target = None,
    *,
    shared: Shared,
) -> None:
    """Study every head of a model and write a page about it.

    Without MODEL, a small model is trained on a generated grammar first: the Mini-GPT.
    """
    _check(model, {"text": text, "target": target}, lab_folder, shared)
    if model is None and roles is False:
        raise ArgumentError(
            "report: --no-roles is for a MODEL, and none is named. Name one, or leave it out."
        )
    check_output(out, ".html")
    from headwise.cli import _progress

    if model is not None and text is not None:
        study = _progress.study_model(model, text, shared, target=target, roles=roles)
    else:
        given = {} if shared.seed is None else {"seed": shared.seed}
        study = _progress.study_mini_gpt(lab_folder or _LAB, given)
    page = study.report(out)
    for line in study.findings():
        say(line)
    say(f"The page is {page.resolve()}")


def _check(
    model: str | None, files: dict[str, Path | None], lab_folder: Path | None, shared: Shared
) -> None:
    """Refuse what would be ignored otherwise."""
    if model is not None and files["text"] is None:
        raise ArgumentError(f"report: {model} needs something to read. Add --text FILE.")
    if model is not None and lab_folder is not None:
        raise ArgumentError(
            f"report: --lab-folder {lab_folder} is for the Mini-GPT, not for {model}. "
            f"Leave one of them out."
        )
    for_models = {**files, **vars(shared)}
    del for_models["seed"]
    stray = [name.replace("_", "-") for name, value in for_models.items() if value is not None]
    if model is None and stray:
        raise ArgumentError(
            f"report: --{stray[0]} is for a MODEL, and none is named; the Mini-GPT reads lines of "
            f"its own grammar. Name a MODEL, or leave --{stray[0]} out."
        )
