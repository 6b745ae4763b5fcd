"""The commands: parse, call, print; no maths. What a command needs is imported when it runs."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headwise._library import library
from headwise.cli._arguments import CheckedCommand
from headwise.cli._count import count
from headwise.cli._group import group
from headwise.cli._importance import importance
from headwise.cli._observe import observe
from headwise.cli._options import Json, spread
from headwise.cli._print import complain
from headwise.cli._prune import prune
from headwise.cli._report import report
from headwise.cli._roles import roles
from headwise.cli._train import train
from headwise.errors import HeadwiseError

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, rich_markup_mode=None)
for command in (report, train, observe, roles, importance, prune, group, count):
    app.command(cls=CheckedCommand)(spread(command))


@app.command(cls=CheckedCommand)
def explain(
    weights: Annotated[
        Path | None, typer.Option(help="A JSON file: your tokens, query and weights.")
    ] = None,
    values: Annotated[Path | None, typer.Option(help="A JSON file: your values.")] = None,
    as_json: Json = False,
) -> None:
    """Show a worked example of two heads, step by step."""
    from rich.console import Console

    from headwise.cli import _explain

    _explain.run(weights, values, as_json, Console())


def _print_version(wanted: bool) -> bool:
    if wanted:
        kernel = library()
        typer.echo(f"headwise {version('headwise')} (torch {version('torch')})")
        typer.echo(f"native kernel: {kernel.name} ({kernel.why})")
        raise typer.Exit
    return wanted


@app.callback()
def _headwise(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Multi-head attention, head by head: watch every head of a model, and see what it does."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and leave: 0 when all is done, 2 and one line when something is wrong.

    An interruption leaves with 130. Anything else that is raised is a mistake of ours, and its
    traceback is shown.

    Args:
        arguments: What stands after `headwise`. None takes it from the command line.
    """
    _hush()
    given = sys.argv[1:] if arguments is None else arguments
    command = typer.main.get_command(app)
    try:
        code = command.main(given or ["--help"], "headwise", standalone_mode=False)
    except HeadwiseError as error:
        code = complain(str(error))
    except typer.TyperException as error:  # a usage error
        code = complain(f"{error.format_message().rstrip('.')}. headwise --help tells more.")
    except OSError as error:  # such as a full disk
        code = complain(f"{error.filename or 'headwise'}: {error.strerror or error}.")
    except (MemoryError, RuntimeError) as error:
        if not _is_about_memory(error):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0].rstrip(".")
        code = complain(
            f"headwise: not enough memory ({reason}). Give smaller sizes or fewer texts."
        )
    if code == 130:
        complain("Interrupted.")
    sys.exit(code)


def _is_about_memory(error: Exception) -> bool:
    """Whether memory ran out, of which torch says so in words alone."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _hush() -> None:
    """Keep the libraries' own remarks and bars from standing around our one line."""
    for prefix in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{prefix}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
