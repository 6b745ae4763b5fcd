"""`headwise look`: the attention of every head on one sentence, as a page."""

import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from headwise.cli._options import Force, Model, ModelOptions, check_output, opt
from headwise.cli._print import print_note, print_result
from headwise.errors import ArgumentError


def look(
    model: Model,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="The sentence, in quotes, or - for standard input."),
    ],
    out: Annotated[
        Path | None, opt("The page to write.", "--out", "-o", shown="one in a temporary folder")
    ] = None,
    target: Annotated[
        str | None,
        opt("For an encoder-decoder: what its decoder reads.", shown="what the model generates"),
    ] = None,
    force: Force = False,
    *,
    options: ModelOptions,
) -> None:
    """Show the attention of every head of a model on one sentence.

    Writes a page and opens it in a browser, if there is one.
    """
    check_output(out, ".html", force=force)
    if os.path.isfile(text):
        raise ArgumentError(
            f"look: {text} is a file, and TEXT is the sentence itself. Give its words in quotes, "
            f"or read it from standard input: headwise look MODEL - < {text}."
        )
    from headwise import report
    from headwise.cli._inputs import STANDARD_INPUT, open_model, plain_texts, title_of

    if text == str(STANDARD_INPUT):
        text = "\n".join(plain_texts(STANDARD_INPUT, paragraphs=False))
    opened, tokenizer = open_model(model, options, text_for="look")
    result = report.look(opened, tokenizer, text, target=target, title=title_of(model))
    out = out or Path(mkdtemp(prefix="headwise-")) / "look.html"
    in_browser = result.open(out)
    print_note(result.summary())
    print_result(f"The page is {out.resolve()}")
    if not in_browser:
        print_note("No browser was opened. Open the page in one.")
