"""The application: every command, and the options of `headwise` itself."""

from typing import Annotated, Any

import typer

from headwise.cli._arguments import CheckedCommand
from headwise.cli._cache import cache
from headwise.cli._compare import compare
from headwise.cli._corpus import corpus, merge
from headwise.cli._count import count
from headwise.cli._explain import explain
from headwise.cli._group import group
from headwise.cli._heads import heads
from headwise.cli._importance import importance
from headwise.cli._observe import observe
from headwise.cli._options import with_flat_options
from headwise.cli._prune import prune
from headwise.cli._report import report
from headwise.cli._roles import roles
from headwise.cli._single_text import look
from headwise.cli._train import train

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# The commands in the order of `headwise --help`, each with the example that ends its own help.
_COMMANDS: dict[Any, str] = {
    report: "headwise report gpt2 --text texts.txt --out report.html",
    look: 'headwise look gpt2 "The animal was tired." --out look.html',
    train: 'headwise train --out mini-gpt --prompt "I always work ="',
    observe: "headwise observe gpt2 --text texts.txt --out table.csv",
    roles: "headwise roles gpt2 --spans annotated.jsonl --out roles.parquet",
    heads: "headwise heads gpt2 --examples examples.jsonl --out heads.json",
    importance: "headwise importance gpt2 --text texts.txt --out scores.parquet",
    prune: "headwise prune gpt2 --by scores.parquet --remove 0.3 --text texts.txt --out smaller",
    group: "headwise group Qwen/Qwen3-0.6B --kv-heads 4 --text texts.txt --out grouped",
    compare: "headwise compare gpt2 ./fine-tuned --text texts.txt --out compare.html",
    cache: "headwise cache gpt2 --keep 0.5 --window 256 --out plan.json",
    corpus: "headwise corpus gpt2 --data 'data/*.parquet' --out run --shards 8",
    merge: "headwise merge run --out table.parquet",
    count: "headwise count --d-model 768 --heads 12 --layers 12 --tokens 1024",
    explain: "headwise explain",
}
EXAMPLES = {command.__name__: example for command, example in _COMMANDS.items()}
for command, example in _COMMANDS.items():
    app.command(cls=CheckedCommand, epilog=f"Example: {example}")(with_flat_options(command))


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
