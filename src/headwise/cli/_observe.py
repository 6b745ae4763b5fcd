"""`headwise observe`: the statistics of every head on some texts, as a table."""

from functools import partial
from typing import Annotated, Any, Literal

from headwise._display import counted
from headwise.cli._options import (
    Model,
    OutputWithFigure,
    PerText,
    Shared,
    Statistics,
    Target,
    TextFile,
    opt,
)
from headwise.cli._print import print_heads, print_note, progress_bar
from headwise.errors import ArgumentError


def observe(
    model: Model,
    text: TextFile = None,
    data: Annotated[
        list[str] | None,
        opt(
            "Instead of --text, a large corpus: a glob of .parquet, .jsonl, .csv or .txt files, "
            "in quotes. Repeatable.",
            metavar="<glob>",
        ),
    ] = None,
    column: Annotated[str, opt("The column or JSON key of --data with the texts.")] = "text",
    address: Annotated[str | None, opt("A Ray cluster for --data.", shown="this machine")] = None,
    workers: Annotated[
        int | None,
        opt("How many processes of Ray open the model.", shown="one for each CPU", min=1),
    ] = None,
    on_error: Annotated[
        Literal["raise", "skip"], opt("What happens if the model refuses a text of --data.")
    ] = "raise",
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
    from headwise.batches import observe_files
    from headwise.checkpoints import load_tokenizer
    from headwise.cli import _inputs
    from headwise.models.texts import reads_two_texts
    from headwise.report import observe_texts, pairs_for

    # What is wrong with names or texts is found fast, and opening a model is not.
    _inputs.check_statistics(statistics)
    if data is not None:
        for name, value in (
            ("text", text), ("target", target), ("seed", shared.seed),
            ("max-texts", shared.max_texts), ("paragraphs", shared.paragraphs),
        ):  # fmt: skip
            if value is not None:
                raise ArgumentError(f"headwise: --{name} is not for --data. Leave it out.")
        tokenizer = load_tokenizer(model)
        table = observe_files(
            data,
            model=model,
            tokenizer=tokenizer,
            request=_request(statistics, per_text, tokenizer),
            column=column,
            address=address,
            workers=workers,
            max_tokens=shared.max_tokens,
            on_error=on_error,
            **_inputs.loading(shared),
        )
        if table.skipped:
            print_note(f"The model refused {counted(table.skipped, 'text')}, left out here.")
    elif text is None:
        raise ArgumentError("headwise: no texts. Give --text FILE, or --data GLOB.")
    else:
        texts, targets = _inputs.read_texts_and_targets(text, target, shared)
        opened, tokenizer = _inputs.open_model(model, shared, text_for="observe")
        if not reads_two_texts(opened):
            _inputs.note_split_texts(texts, opened, tokenizer, shared)
        request = _request(statistics, per_text, tokenizer)
        with progress_bar(f"Observing {model}") as on_progress:
            table, _ = observe_texts(
                "observe",
                opened,
                tokenizer,
                pairs_for("observe", opened, texts, targets),
                request,
                shared.max_tokens,
                on_progress,
            )
    output.save(counted(len(table.heads), "head"), table.save)
    means = {name: table.mean(name) for name in table.statistics}
    output.draw("A map of each statistic", partial(_inputs.draw_figure, means, table.plot))
    output.show(table.frame(), print_heads)


def _request(statistics: str | None, per_text: bool, tokenizer: Any) -> Any:
    """What the options name; without names every statistic, and the mass on classes of tokens."""
    from headwise.cli._inputs import request_of
    from headwise.models.texts import token_classes
    from headwise.watch import Request

    request = request_of(statistics, per_text, tokenizer)
    if request is not None:
        return request
    return Request(classes={name: ids for name, (ids, _) in token_classes(tokenizer).items()})
