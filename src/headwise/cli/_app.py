"""The application: every command, and the options of `headwise` itself."""

from typing import Annotated

import typer

from headwise.cli._arguments import CheckedCommand
from headwise.cli._examples import EXAMPLES
from headwise.cli._options import with_flat_options
from headwise.cli.commands import (
    cache,
    compare,
    corpus,
    count,
    explain,
    group,
    heads,
    importance,
    look,
    merge,
    observe,
    prune,
    report,
    roles,
    train,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
for command in (
    report,
    look,
    train,
    observe,
    roles,
    heads,
    importance,
    prune,
    group,
    compare,
    cache,
    corpus,
    merge,
    count,
    explain,
):
    example = f"Example: {EXAMPLES[command.__name__]}"
    app.command(cls=CheckedCommand, epilog=example)(with_flat_options(command))


def _print_version(show_version: bool) -> bool:
    if show_version:
        from importlib.metadata import version

        from headwise._library import library

        kernel = library()
        typer.echo(f"headwise {version('headwise')} (torch {version('torch')})")
        typer.echo(f"native kernel: {kernel.name} ({kernel.why})")
        raise typer.Exit
    return show_version


@app.callback()
def _headwise(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and exit."
        ),
    ] = False,
) -> None:
    """Multi-head attention, head by head: measure, explain and remove the heads of a model."""
