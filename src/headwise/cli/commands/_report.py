"""`headwise report`: a page about every head of a model, or of the Mini-GPT."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Force, Shared, Target, check_output
from headwise.cli._print import print_result
from headwise.errors import ArgumentError

_LAB_FOLDER = Path("mini-gpt")


_FindRoles = Annotated[
    bool | None,
    typer.Option(
        "--roles/--no-roles",
        help="Find the roles of the heads of MODEL, too.",
        show_default="unless MODEL is an encoder-decoder",
    ),
]
_Show = Annotated[
    Path | None,
    typer.Option(
        help="Up to 48 texts whose attention the page shows: a file like that of --text.",
        show_default="the beginnings of three texts",
    ),
]
_Full = Annotated[
    bool, typer.Option("--full", help="Leave nothing out to keep the page below 5 MB.")
]


def report(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder or a name on the Hugging Face hub."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="The texts for MODEL: a UTF-8 file with one text per paragraph or line, or - for "
            "standard input."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    lab_folder: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the Mini-GPT, which is trained there if need be.",
            show_default=str(_LAB_FOLDER),
        ),
    ] = None,
    roles: _FindRoles = None,
    target: Target = None,
    show: _Show = None,
    full: _Full = False,
    force: Force = False,
    *,
    shared: Shared,
) -> None:
    """Study every head of a model and write a page about it.

    Without MODEL, trains and studies a small model of a generated grammar: the Mini-GPT.
    """
    _check(model, {"text": text, "target": target, "show": show}, lab_folder, shared)
    _check_roles(model, roles)
    check_output(out, ".html", force=force)
    from headwise.cli import tasks

    if model is not None and text is not None:
        shown = tasks.Shown(show, full)
        study = tasks.study_model(model, text, shared, target=target, roles=roles, show=shown)
    else:
        settings = {} if shared.seed is None else {"seed": shared.seed}
        study = tasks.study_mini_gpt(lab_folder or _LAB_FOLDER, settings)
    for line in study.findings():
        print_result(line)
    print_result(f"The page is {study.report(out, full=full).resolve()}")


def _check_roles(model: str | None, roles: bool | None) -> None:
    if model is None and roles is False:
        raise ArgumentError(
            "report: --no-roles is for a MODEL, and none is named. Name one, or leave it out."
        )


def _check(
    model: str | None, files: dict[str, Path | None], lab_folder: Path | None, shared: Shared
) -> None:
    """Refuse options that would otherwise be ignored."""
    if model is not None and files["text"] is None:
        raise ArgumentError(f"report: {model} needs something to read. Add --text FILE.")
    if model is not None and lab_folder is not None:
        raise ArgumentError(
            f"report: --lab-folder {lab_folder} is for the Mini-GPT, not for {model}. "
            f"Leave one of them out."
        )
    for_models = {**files, **vars(shared)}
    del for_models["seed"]
    unused = [name.replace("_", "-") for name, value in for_models.items() if value is not None]
    if model is None and unused:
        raise ArgumentError(
            f"report: --{unused[0]} is for a MODEL, and none is named; the Mini-GPT reads lines "
            f"of its own grammar. Name a MODEL, or leave --{unused[0]} out."
        )
