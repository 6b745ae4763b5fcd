"""The application: every command, how its command line is checked, and `headwise` itself."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from headwise.cli._cache import cache
from headwise.cli._compare import compare
from headwise.cli._effects import effects
from headwise.cli._explain import explain
from headwise.cli._heads import heads
from headwise.cli._importance import importance
from headwise.cli._observe import observe
from headwise.cli._prune import prune
from headwise.cli._report import report
from headwise.cli._roles import roles
from headwise.cli._single_text import look
from headwise.cli._train import train
from headwise.errors import ArgumentError, HeadwiseError

_OUTPUTS = ("--out", "--figure", "--save", "--save-examples", "--vllm-hook", "--qrhead")
_MODELS = ("MODEL", "BEFORE", "AFTER")  # a folder, a file, or a name on the hub


class CheckedCommand(TyperCommand):
    """A command whose errors name the option and the value that is refused.

    Errors of the library, which name arguments, begin with the options that set them.

    It refuses empty values (except for `--prompt`), values with bytes that are not UTF-8 or with
    NUL, and numbers that are not finite.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            BadParameter: a value is refused, or does not have the type of its option.
        """
        # The strings as they were typed: once converted, an empty path is the current folder.
        raw, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        params: list[Any] = [*self.params]
        strings = [(param, [*_strings(raw.get(param.name))]) for param in params]
        for param, values in strings:
            for value in values:
                reason = _refusal(value, may_be_empty=param.name == "prompt")
                if reason:
                    raise typer.BadParameter(f"{value!r} {reason}", ctx=ctx, param=param)
        try:
            unparsed = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            values = next((values for param, values in strings if param is error.param), [])
            if values and repr(values[-1]) not in error.message:
                error.message = f"{values[-1]!r}. {error.message}"
            if isinstance(error.param, TyperArgument | TyperOption) and not error.message:
                error.message = error.param.help or ""  # says what to give for what is missing
            raise
        for param in params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=param)
        return unparsed

    def invoke(self, ctx: Any) -> Any:
        """Check the files, and run the command."""
        params: list[Any] = self.params
        _check_files(
            str(self.name),
            {
                x.opts[0].upper() if isinstance(x, TyperArgument) else x.opts[0]: ctx.params[x.name]
                for x in params
            },
        )
        try:
            return super().invoke(ctx)
        except HeadwiseError as error:
            words = f" {error}"
            options = [
                x.opts[0]
                for x in params
                if ctx.params[x.name] is not None
                and any(f" {x.name}{then}" in words for then in ("=", " is "))
            ]
            if options:
                error.args = (f"{', '.join(options)}: {error}",)
            raise


def _check_files(command: str, values: Mapping[str, Any]) -> None:
    """Refuse an output that is one of the inputs, and two inputs from standard input.

    Args:
        command: Its name, with which an error begins.
        values: Those of arguments and options, by their names on the command line.
    Raises:
        ArgumentError: one of them is given, or paragraphs of no file are asked for.
    """
    if values.get("--paragraphs") and values.get("--text") is None:
        raise ArgumentError(f"{command}: --paragraphs is for --text. Add --text FILE.")
    paths = {name: value for name, value in values.items() if isinstance(value, Path)}
    inputs = {name: path for name, path in paths.items() if name not in _OUTPUTS}
    standard = [name for name, path in inputs.items() if path == Path("-")]
    if len(standard) > 1:
        raise ArgumentError(
            f"{command}: {' and '.join(standard)} both read standard input. Give a file for one "
            f"of them."
        )
    inputs |= {name: Path(values[name]) for name in _MODELS if values.get(name) is not None}
    for output in [name for name in _OUTPUTS if name in paths and paths[name].exists()]:
        for name, source in inputs.items():
            if source.exists() and source.samefile(paths[output]):
                raise ArgumentError(
                    f"output: {output} {paths[output]} is the input {name} {source}, which "
                    f"would be lost. Name another place."
                )


def _strings(value: Any) -> Iterator[str]:
    """The strings of an option, which may be repeated or take several values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _refusal(value: str, *, may_be_empty: bool) -> str:
    """Why a value is refused; empty if it is not."""
    if "\0" in value:
        return "holds a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "is not valid UTF-8"
    return "" if may_be_empty or value.strip() else "is empty"


app = typer.Typer(add_completion=False, rich_markup_mode=None)
# The commands in the order of `headwise --help`, each with the example that ends its own help.
_COMMANDS: dict[Any, str] = {
    report: "headwise report gpt2 --text texts.txt --out report.html",
    look: 'headwise look gpt2 "The animal was tired." --out look.html',
    train: 'headwise train --out mini-gpt --prompt "I always work ="',
    observe: "headwise observe gpt2 --text texts.txt --out table.csv",
    roles: "headwise roles gpt2 --spans annotated.jsonl --out roles.parquet",
    heads: "headwise heads gpt2 --task needle --text texts.txt --out heads.json",
    effects: "headwise effects gpt2 --examples answers.jsonl --out effects.parquet",
    importance: "headwise importance gpt2 --text texts.txt --out scores.parquet",
    prune: "headwise prune gpt2 --by scores.parquet --remove 0.3 --text texts.txt --out smaller",
    compare: "headwise compare gpt2 ./fine-tuned --text texts.txt --out compare.parquet",
    cache: "headwise cache gpt2 --keep 0.5 --window 256 --out plan.json",
    explain: "headwise explain",
}
EXAMPLES = {command.__name__: example for command, example in _COMMANDS.items()}
for command, example in _COMMANDS.items():
    app.command(cls=CheckedCommand, epilog=f"Example: {example}")(command)


def _print_version(show_version: bool) -> bool:
    if show_version:
        from importlib.metadata import version

        from headwise._native_library import library

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
