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
    from headwise.models.texts import reads_two_texts, token_classes
    from headwise.report import observe_texts
    from headwise.watch import Request

    # What is wrong with names or texts is found fast, and opening a model is not.
    _inputs.check_statistics(statistics)
    texts, targets = _inputs.read_texts_and_targets(text, target, shared)
    opened, tokenizer = _inputs.open_model(model, shared, text_for="observe")
    if not reads_two_texts(opened):
        _inputs.note_split_texts(texts, opened, tokenizer, shared)
    request = _inputs.request_of(statistics, per_text, tokenizer)
    if request is None:  # every statistic, and the mass on each class of tokens
        classes = {name: ids for name, (ids, _) in token_classes(tokenizer).items()}
        request = Request(classes=classes)
    with progress_bar(f"Observing {model}") as on_progress:
        table, _ = observe_texts(
            "observe",
            opened,
            tokenizer,
            texts,
            targets,
            request,
            shared.max_tokens,
            on_progress,
        )
    output.save(counted(len(table.heads), "head"), table.save)
    means = {name: table.mean(name) for name in table.statistics}
    output.draw("A map of each statistic", partial(_inputs.draw_figure, means, table.plot))
    output.show(table.frame(), print_heads)
