"""`headwise compare`: what differs between two models, head by head."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_json, print_note, print_result, print_table, progress_bar
from headwise.errors import ArgumentError

_COLUMNS = ["name", "statistic", "before", "after", "difference"]
_COLUMNS += ["size", "ci_low", "ci_high", "p_adj"]


def compare(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE",
            help="A model's folder, GGUF file or name on the Hugging Face hub, a study saved by "
            "report --save, or a table written by observe --per-text.",
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The same for the other model.")],
    text: Annotated[
        Path | None,
        opt("For models: a UTF-8 file with one text per line, or - for standard input."),
    ] = None,
    roles: Annotated[
        bool, opt("Also find the roles of both models; takes longer.", "--roles")
    ] = False,
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
    """Compare two models head by head, on the same texts.

    Prints what differs, by size, the largest last: the difference in standard deviations over the
    heads. With -o, writes the whole table; with --json, prints all rows as JSON. Heads of pruned
    models are matched by their original numbers.
    """
    _options.check_output(out, *_options.TABLES, force=force)
    _options.check_figure(figure, force)
    unused = _options.given_options(
        roles=roles or None, device=device, dtype=dtype, attention=attention, seed=seed,
        max_texts=max_texts, max_tokens=max_tokens, paragraphs=paragraphs,
    )  # fmt: skip
    _check_sides([before, after], text, unused)
    from headwise import report
    from headwise.cli._inputs import draw_figure, open_model, read_drawn_texts, title_of
    from headwise.tables import HeadTable

    titles = before, after
    if text is None:
        titles = Path(before).name, Path(after).name
        sides: Any = [
            report.load_study(path) if Path(path).is_dir() else HeadTable.load(path)
            for path in (before, after)
        ]
        comparison = report.compare(*sides)
    else:
        titles = title_of(before), title_of(after)
        texts = read_drawn_texts(text, seed, max_texts, paragraphs)
        opened = [
            open_model(name, device, dtype, attention, text_for="compare")
            for name in (before, after)
        ]
        with progress_bar(f"Comparing {before} and {after}") as on_progress:
            comparison = report.compare(
                opened[0][0],
                opened[1][0],
                texts,
                tokenizer=(opened[0][1], opened[1][1]),
                roles=roles,
                max_tokens=max_tokens,
                on_progress=on_progress,
            )
    comparison = replace(comparison, titles=titles)
    means = {name: comparison.values("difference", name) for name in comparison.statistics}
    draw = partial(draw_figure, means, comparison.plot)
    _options.write_output("A map of each difference", draw, figure, force)
    if as_json:
        print_note(comparison.summary)
        print_json(comparison.frame().to_dict("records"))
    else:
        print_result(comparison.summary)
    _options.write_output("The comparison", comparison.save, out, force)
    tested = not comparison.rows["outcome"].str.startswith("not tested").all()
    if out is None and tested and not as_json:
        print_table(comparison.changed()[_COLUMNS].iloc[::-1])


def _check_sides(names: list[str], text: Path | None, unused: list[str]) -> None:
    """Refuse models without texts, and options that would be ignored for tables and studies."""
    paths = [Path(name) for name in names]
    are_saved = [
        (path.is_file() and path.suffix.lower() != ".gguf") or (path / "study.json").is_file()
        for path in paths
    ]
    if len(set(are_saved)) == 2:
        saved, other = sorted(names, key=lambda name: not are_saved[names.index(name)])
        raise ArgumentError(
            f"compare: {saved} holds results already, and {other} is neither a table nor a saved "
            f"study. Compare two studies, or two models."
        )
    for name, is_saved in zip(names, are_saved, strict=True):
        if text is None and not is_saved:
            raise ArgumentError(
                f"compare: {name} is neither a table nor a saved study, and models need texts to "
                f"read. Add --text FILE."
            )
        if text is not None and is_saved:
            raise ArgumentError(
                f"compare: --text is for models, and {name} holds results already. Leave it out."
            )
    if text is None and unused:
        raise ArgumentError(
            f"compare: --{unused[0]} is for models, and {names[0]} holds results "
            f"already. Leave it out."
        )
