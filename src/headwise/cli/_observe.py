"""`headwise observe`: the statistics of every head on some texts, as a table."""

from pathlib import Path
from typing import Annotated

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
    opt,
    write_output,
)
from headwise.cli._print import print_heads, print_json, print_note


def observe(
    model: Model,
    text: Annotated[
        Path, opt("The texts: a UTF-8 file with one text per line, or - for standard input.")
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
    check_output(out, ".parquet", ".csv", ".json", force=force)
    check_figure(figure, force)
    from headwise.cli._inputs import draw_figure
    from headwise.cli._study import study_model

    table = study_model(
        model, text, shared, target=target, statistics=statistics, per_text=per_text
    ).table
    if out is not None:
        print_note(f"{counted(len(table.heads), 'head')}: {write_output(table.save, out, force)}")
    if figure is not None:
        means = {name: table.mean(name) for name in table.statistics}
        print_note(f"A map of each statistic: {draw_figure(means, table.plot, figure)}")
    if as_json:
        print_json(table.frame().to_dict("records"))
    if out is None and not as_json:
        print_heads(table.frame())
