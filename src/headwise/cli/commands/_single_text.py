"""`headwise look`: the attention of every head on one sentence, as a page."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from headwise.cli._options import Attention, Device, Dtype, Force, Model, Shared, check_output
from headwise.cli._print import print_note, print_result


def look(
    model: Model,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="The sentence, in quotes, or - for standard input."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The page to write.", show_default="one in a temporary folder"
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="For an encoder-decoder: what its decoder reads.",
            show_default="what the model generates",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    attention: Attention = None,
    force: Force = False,
) -> None:
    """Show the attention of every head of a model on one sentence.

    Writes a page and opens it in a browser, if there is one.
    """
    if out is not None:
        check_output(out, ".html", force=force)
    from headwise.cli import tasks

    shared = Shared(device=device, dtype=dtype, attention=attention)
    result = tasks.look_at_text(model, text, target, shared)
    out = out or Path(mkdtemp(prefix="headwise-")) / "look.html"
    opened = result.open(out)
    print_note(result.summary())
    print_result(f"The page is {out.resolve()}")
    if not opened:
        print_note("No browser was opened. Open the page in one.")
