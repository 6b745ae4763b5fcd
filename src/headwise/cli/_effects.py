"""`headwise effects`: what each head writes of a difference of logits, as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from headwise._display import counted
from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_note, print_table, progress_bar

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20  # heads that are printed


def effects(
    model: _options.Model,
    examples: Annotated[
        Path,
        opt(
            "JSON lines with text, right (the answer that follows it, such as ' Mary' with its "
            "space) and other (the answer to compare it with; without it, the mean of all logits)."
        ),
    ],
    heads: _options.Heads = None,
    total: Annotated[
        Literal["mean", "zero", "none"],
        opt("What replaces a removed head; none measures direct effects alone, in one pass."),
    ] = "mean",
    out: _options.Out = None,
    force: _options.Force = False,
    as_json: _options.Json = False,
    figure: _options.Figure = None,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    max_texts: _options.MaxTexts = None,
) -> None:
    """Measure which heads write an answer, and which cancel it.

    Prints the heads with the largest direct effects; with --json, all heads as JSON. With -o,
    also writes all heads.
    """
    _options.check_output(out, *_options.TABLES, force=force)
    _options.check_figure(figure, force)
    from headwise import head_effects
    from headwise.cli import _inputs
    from headwise.corpora import read_answers

    read = _inputs.draw_texts(read_answers(examples), seed, max_texts)
    opened, tokenizer = _inputs.open_model(model, device, dtype, attention)
    note_few_examples(read)
    with progress_bar(f"Measuring the effects of the heads of {model}") as on_progress:
        measured = head_effects.effects(
            opened,
            read,
            tokenizer=tokenizer,
            heads=heads or None,
            total=None if total == "none" else total,
            seed=seed or 0,
            on_progress=on_progress,
        )
    for line in (str(measured), *measured.notes):
        print_note(line)
    _options.write_output("The effects of all heads", measured.save, out, force)
    _options.write_figure("Total against direct effects", measured.plot, figure, force)

    def print_largest(rows: "pd.DataFrame") -> None:
        largest = rows["direct"].abs().sort_values(ascending=False, kind="stable").index[:_SHOWN]
        columns = ["name", "direct", "ci_low", "ci_high", "p_adj", "kind", "total", "repair"]
        print_table(rows.loc[largest, columns])

    _options.show_rows(measured.frame(), as_json, None, print_largest)


def note_few_examples(examples: "Sequence[tuple[str, str, str | None]]") -> None:
    """Note before the work that examples are too few for a test; `report` does, too."""
    from headwise.head_effects import FEWEST_EXAMPLES

    distinct = len({*examples})
    if distinct < FEWEST_EXAMPLES:
        print_note(
            f"Of {counted(distinct, 'distinct example')} no head can be tested for what it writes: "
            f"give {FEWEST_EXAMPLES} or more"
        )
