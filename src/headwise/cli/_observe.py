"""`headwise observe`: the statistics of every head on some texts, as a table."""

from functools import partial
from pathlib import Path
from typing import Annotated

from headwise._display import counted
from headwise.cli._options import Model, OutputWithFigure, PerText, Shared, Statistics, Target, opt
from headwise.cli._print import print_heads, progress_bar


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
    from headwise.cli import _inputs
    from headwise.models.texts import reads_two_texts
    from headwise.report import study

    # What is wrong with names or texts is found fast, and opening a model is not.
    _inputs.check_statistics(statistics)
    texts, targets = _inputs.read_texts_and_targets(text, target, shared)
    opened, tokenizer = _inputs.open_model(model, shared, text_for="study")
    if not reads_two_texts(opened):
        _inputs.note_split_texts(texts, opened, tokenizer, shared)
    with progress_bar(f"Studying {model}") as on_progress:
        table = study(
            opened,
            tokenizer,
            texts,
            targets=targets,
            request=_inputs.request_of(statistics, per_text, tokenizer),
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        ).table
    output.save(counted(len(table.heads), "head"), table.save)
    means = {name: table.mean(name) for name in table.statistics}
    output.draw("A map of each statistic", partial(_inputs.draw_figure, means, table.plot))
    output.show(table.frame(), print_heads)
