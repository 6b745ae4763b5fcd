"""`headwise observe`: the statistics of every head on some texts, as a table."""

from pathlib import Path
from typing import Annotated

import typer

from headwise._display import counted
from headwise.cli._options import (
    Figure,
    Force,
    Json,
    Model,
    PerText,
    Shared,
    Statistics,
    TableFile,
    Target,
    check_figure,
    check_output,
    names_in,
    write_output,
)
from headwise.cli._print import print_heads, print_json, print_note


def observe(
    model: Model,
    text: Annotated[
        Path,
        typer.Option(
            help="The texts: a UTF-8 file with one text per line, or - for standard input."
        ),
    ],
    out: TableFile = None,
    statistics: Statistics = None,
    target: Target = None,
    per_text: PerText = False,
    force: Force = False,
    figure: Figure = None,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Compute attention statistics of every head of a model.

    Prints a row per head. With -o, writes the table; with --json, prints JSON.
    """
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json", force=force)
    check_figure(figure, force)
    from headwise.cli import tasks

    requested = tasks.RequestedStatistics(names_in(statistics), per_text)
    requested.check()
    table = tasks.study_model(model, text, shared, requested, target=target).table
    if out is not None:
        print_note(f"{counted(len(table.heads), 'head')}: {write_output(table.save, out, force)}")
    if figure is not None:
        print_note(f"A map of each statistic: {tasks.draw_statistics(table, figure)}")
    if as_json:
        print_json(table.frame().to_dict("records"))
    if out is None and not as_json:
        print_heads(table.frame())
