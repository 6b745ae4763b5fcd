"""Options that several commands share, and checks of the output before any work is done."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise._extras import require
from headwise.cli._print import print_json, print_note, print_table
from headwise.errors import ArgumentError, OutputError
from headwise.files import check_writable, file_of_others, write_beside

if TYPE_CHECKING:
    import pandas as pd

TABLES = (".parquet", ".csv", ".json")
"""The endings of a table."""


def opt(help: str, *names: str, shown: str | bool = True, **settings: Any) -> Any:
    """An option by its description; `shown` is what the help says of a default that is not set."""
    return typer.Option(*names, help=help, show_default=shown, **settings)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a GGUF file, or a name on the Hugging Face hub."
    ),
]
TextFile = Annotated[
    Path | None, opt("The texts: a UTF-8 file with one text per line, or - for standard input.")
]
PairsFile = Annotated[
    Path | None,
    opt(
        "Instead of --text: a CSV file of sentence pairs and their similarity. Without a header: "
        "sentence,sentence,number, on any scale."
    ),
]
Target = Annotated[
    Path | None,
    opt(
        "For an encoder-decoder: a UTF-8 file with the target of each line of --text.",
        shown="the text itself",
    ),
]
Device = Annotated[str | None, opt("The device to run on, such as cuda.", shown="cpu")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    opt("The dtype to compute in.", shown="that of the saved model"),
]
Attention = Annotated[
    Literal["headwise", "sdpa", "eager"] | None,
    opt(
        "The attention implementation: headwise's kernels, torch's, or the model's own.",
        shown="what transformers chooses",
    ),
]
Seed = Annotated[
    int | None, opt("The seed of all random numbers.", shown="0", min=0, max=2**32 - 1)
]
MaxTexts = Annotated[int | None, opt("Use this many texts, drawn at random.", shown="all", min=1)]
MaxTokens = Annotated[
    int | None,
    opt(
        "Split longer texts into pieces of at most this many tokens.",
        shown="the model's context, at most 2048",
        min=2,
    ),
]
Paragraphs = Annotated[
    bool | None,
    opt(
        "A text ends at a blank line, not at each line.",
        "--paragraphs",
        shown="each line is a text",
    ),
]
Statistics = Annotated[
    str | None,
    opt(
        "Names of statistics, separated by commas, such as entropy,special,top(first).",
        shown="all that are cheap",
    ),
]
PerText = Annotated[bool, opt("Keep statistics per text, for confidence intervals.", "--per-text")]
Heads = Annotated[
    list[str] | None,
    opt(
        "A head that was named before these inputs were seen, such as L3.H1: p is adjusted for "
        "such heads alone. Repeatable.",
        "--head",
        metavar="HEAD",
        shown="all",
    ),
]
Nulls = Annotated[
    str | None,
    opt(
        "The nulls to test against, separated by commas: permuted and random (weights), shuffled "
        "(words, in headwise roles), exchanged (tokens of the spans, in headwise heads); or none. "
        "Each costs another evaluation.",
        shown="all that the model allows",
    ),
]
Out = Annotated[Path | None, opt("The file to write: .parquet, .csv or .json.", "--out", "-o")]
JsonOut = Annotated[Path | None, opt("The file to write: .json.", "--out", "-o")]
Force = Annotated[bool, opt("Overwrite existing output.", "--force")]
Figure = Annotated[Path | None, opt("Also draw the result: .svg, .png or .pdf.", "--figure")]
Json = Annotated[bool, opt("Print JSON.", "--json")]


def given_options(**options: Any) -> list[str]:
    """The options that are set, by their names on the command line."""
    return [name.replace("_", "-") for name, value in options.items() if value is not None]


def show_rows(
    rows: "pd.DataFrame",
    as_json: bool,
    out: Path | None,
    print_rows: "Callable[[pd.DataFrame], None]" = print_table,
) -> None:
    """Print rows as JSON, or, if no file is written, for people."""
    if as_json:
        print_json(rows.to_dict("records"))
    elif out is None:
        print_rows(rows)


def names_of_nulls(nulls: str | None) -> tuple[str, ...] | None:
    """The names that --nulls lists; None for all that the model allows."""
    names = None if nulls is None else tuple(name.strip() for name in nulls.split(","))
    return () if names == ("none",) else names


def check_output(path: Path | None, *endings: str, force: bool) -> None:
    """Refuse an output that could not be written at the end of the work.

    Args:
        force: Whether an existing file may be overwritten.
    Raises:
        ArgumentError: it has none of these endings, or exists and must not be overwritten.
        OutputError: nothing can be written there.
    """
    if path is None:
        return
    if path.suffix not in endings:
        raise ArgumentError(f"output: {path} does not end in {', '.join(endings)}. Rename it.")
    if path.is_dir():
        raise OutputError(f"output: {path} is a folder. Name a file in it.")
    try:
        with TemporaryDirectory(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"output: {path} cannot be written ({error.strerror}). Choose another place."
        ) from error
    _check_absent(path, force)


def write_output(what: str, save: Callable[[Path], object], path: Path | None, force: bool) -> None:
    """Write a file by `save`, if one is named, and note what it holds.

    Raises:
        OutputError: the file exists by now, without --force, or cannot be written.
    """
    if path is not None:
        with write_beside(path, force) as beside:
            save(beside)
        print_note(f"{what}: {path}")


def write_figure(what: str, plot: Callable[[], Any], path: Path | None, force: bool) -> None:
    """Draw a figure into a file, if one is named: `plot` returns its axes."""
    from headwise.tables import save_figure

    write_output(what, lambda beside: save_figure(plot(), beside), path, force)


def check_figure(path: Path | None, force: bool) -> None:
    """Refuse a figure that could not be drawn or written at the end of the work.

    Raises:
        ArgumentError: the path has another ending, or exists and must not be overwritten.
        OutputError: nothing can be written there.
        MissingPackageError: matplotlib is not installed.
    """
    if path is not None:
        require("matplotlib", "plot", "--figure")
        check_output(path, ".svg", ".png", ".pdf", force=force)


def check_folder(path: Path | None, *ours: str, force: bool) -> None:
    """Refuse a folder that could not be written at the end of the work.

    Args:
        ours: As in `file_of_others`: a folder with files of others is not replaced. Without names,
            other files in the folder are left as they are.
        force: Whether an existing folder may be overwritten.
    Raises:
        ArgumentError: it is a file, or a folder that must not be overwritten.
        OutputError: nothing can be written there.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"output: {path} is a file. Name a folder.")
    _check_absent(path, force)
    if name := file_of_others(path, ours):
        raise ArgumentError(
            f"output: {path} holds {name}, which headwise did not write and would delete. "
            f"Name another folder."
        )
    check_writable(path)


def _check_absent(path: Path, force: bool) -> None:
    """Refuse to overwrite a file or a folder that is not empty, except with --force."""
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not empty and not force:
        raise ArgumentError(f"output: {path} already exists. Add --force to overwrite it.")
