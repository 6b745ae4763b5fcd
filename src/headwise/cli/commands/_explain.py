"""`headwise explain`: a worked example of two heads, step by step, or as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Json


def explain(
    weights: Annotated[
        Path | None,
        typer.Option(help="A JSON file with tokens, the query and the weights of each head."),
    ] = None,
    values: Annotated[
        Path | None, typer.Option(help="A JSON file with the values of the tokens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a worked example of two heads, step by step."""
    from rich.console import Console

    from headwise.cli import _worked_example

    _worked_example.run(weights, values, as_json, Console())
