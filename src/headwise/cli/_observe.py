"""`headwise observe`: the statistics of every head on some texts, as a table."""

from functools import partial
from typing import Annotated, Literal

from headwise._display import counted
from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_heads, print_note, progress_bar
from headwise.errors import ArgumentError


def observe(
    model: _options.Model,
    text: _options.TextFile = None,
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
    statistics: _options.Statistics = None,
    target: _options.Target = None,
    per_text: _options.PerText = False,
    out: _options.Out = None,
    force: _options.Force = False,
    as_json: _options.Json = False,
    figure: _options.Figure = None,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    max_texts: _options.MaxTexts = None,
    max_tokens: _options.MaxTokens = None,
    paragraphs: _options.Paragraphs = None,
) -> None:
    """Compute attention statistics of every head of a model.

    Prints a row per head. With -o, writes the table; with --json, prints JSON.
    """
    _options.check_output(out, *_options.TABLES, force=force)
    _options.check_figure(figure, force)
    from headwise.batches import observe_files
    from headwise.checkpoints import load_tokenizer
    from headwise.cli import _inputs
    from headwise.models.texts import reads_two_texts
    from headwise.report import observe_texts, pairs_for

    # What is wrong with names or texts is found fast, and opening a model is not.
    _inputs.check_statistics(statistics)
    if data is not None:
        unused = _options.given_options(text=text, target=target, seed=seed, max_texts=max_texts)
        if unused:
            raise ArgumentError(f"observe: --{unused[0]} is not for --data. Leave it out.")
        tokenizer = load_tokenizer(model)
        table = observe_files(
            data,
            model=model,
            tokenizer=tokenizer,
            request=_inputs.request_of(statistics, per_text, tokenizer),
            column=column,
            address=address,
            workers=workers,
            max_tokens=max_tokens,
            on_error=on_error,
            # A cluster may have a GPU where this machine has none.
            **_inputs.loading(None if address else device, dtype, attention)
            | {"device": device or "cpu"},
        )
        if table.skipped:
            print_note(f"The model refused {counted(table.skipped, 'text')}, left out here.")
    elif text is None:
        raise ArgumentError("observe: no texts. Give --text FILE, or --data GLOB.")
    else:
        texts, targets = _inputs.read_texts_and_targets(text, target, seed, max_texts, paragraphs)
        opened, tokenizer = _inputs.open_model(model, device, dtype, attention, text_for="observe")
        if not reads_two_texts(opened):
            _inputs.note_split_texts(texts, opened, tokenizer, max_tokens)
        request = _inputs.request_of(statistics, per_text, tokenizer)
        with progress_bar(f"Observing {model}") as on_progress:
            table, _ = observe_texts(
                "observe",
                opened,
                tokenizer,
                pairs_for("observe", opened, texts, targets),
                request,
                max_tokens,
                on_progress,
            )
    _options.write_output(counted(len(table.heads), "head"), table.save, out, force)
    means = {name: table.mean(name) for name in table.statistics}
    draw = partial(_inputs.draw_figure, means, table.plot)
    _options.write_output("A map of each statistic", draw, figure, force)
    _options.show_rows(table.frame(), as_json, out, print_heads)
