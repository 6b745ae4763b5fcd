"""`headwise observe`: the statistics of every head on some texts, as a table."""

from functools import partial
from pathlib import Path
from typing import Annotated

from headwise._display import counted
from headwise.cli._options import Model, OutputWithFigure, PerText, Shared, Statistics, Target, opt
from headwise.cli._print import print_heads


def observe(
    model: Model,
    text: Annotated[
        Path, opt("The texts: a UTF-8 file with one text per line, or - for standard input.")
    ],
    statistics: Statistics = None,
    target: Target = None,
    per_text: PerText = False,
    *,
    output: OutputWithFigure,
    shared: Shared,
) -> None:
    """Compute attention statistics of every head of a model.

    Prints a row per head. With -o, writes the table; with --json, prints JSON.
    """
    output.check()
    from headwise.cli._inputs import draw_figure
    from headwise.cli._study import study_model

    table = study_model(
        model, text, shared, target=target, statistics=statistics, per_text=per_text
    ).table
    output.save(counted(len(table.heads), "head"), table.save)
    means = {name: table.mean(name) for name in table.statistics}
    output.draw("A map of each statistic", partial(draw_figure, means, table.plot))
    output.show(table.frame(), print_heads)
