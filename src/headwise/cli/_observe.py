"""`headwise observe`: the statistics of every head on some texts, as a table."""

from pathlib import Path
from typing import Annotated

import typer

from headwise._display import counted
from headwise.cli._options import Json, Model, Shared, Target, check_output
from headwise.cli._print import note, say_json, say_table


def observe(
    model: Model,
    text: Annotated[Path, typer.Option(help="What MODEL reads: a UTF-8 file, a text a paragraph.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The table to write: .parquet, .csv or .json."),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, such as entropy,special,top(first).",
            show_default="all that are cheap",
        ),
    ] = None,
    target: Target = None,
    per_text: Annotated[
        bool, typer.Option("--per-text", help="Keep the sums of each text, for intervals.")
    ] = False,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Watch every head of a model: a row of statistics for each.

    The rows are printed, unless -o or --json says where else they go.
    """
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json")
    from headwise.cli import _progress

    names = None if statistics is None else [one.strip() for one in statistics.split(",")]
    asked = _progress.Asked(names, per_text)
    asked.check()
    table = _progress.study_model(model, text, shared, asked, target=target).table
    if out is not None:
        note(f"{counted(len(table.heads), 'head')}: {table.save(out)}")
    if as_json:
        say_json(table.frame().to_dict("records"))
    if out is None and not as_json:
        known = table.frame().dropna(axis="columns", how="all")  # no sink, and the like
        say_table(known.drop(columns=["stack", "layer", "head"]))
