"""What no command can work with, whatever the option: refused as the command line is read."""

import math
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand


class CheckedCommand(TyperCommand):
    """A command that names the option and the value of what it refuses.

    Refused are empty values, those with bytes that are not UTF-8 or with NUL, and numbers that are
    not finite; `--prompt` may be empty.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            BadParameter: a value is refused, or has not the type of its option.
        """
        raw, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        params: list[Any] = [*self.params]
        named = [(param, [*_strings(raw.get(param.name))]) for param in params]
        for param, values in named:
            for value in values:
                why = _why_not(value, may_be_empty=param.name == "prompt")
                if why:
                    raise typer.BadParameter(f"{value!r} {why}", ctx=ctx, param=param)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            given = next((values for param, values in named if param is error.param), [])
            if given and repr(given[-1]) not in error.message:
                error.message = f"{given[-1]!r}. {error.message}"
            raise
        for param in params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=param)
        return rest


def _strings(value: Any) -> Iterator[str]:
    """The strings of an option, which may be repeated or take several."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _why_not(value: str, *, may_be_empty: bool) -> str:
    """Why a value is refused; empty if it is not."""
    if "\0" in value:
        return "holds a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "is not valid UTF-8"
    return "" if may_be_empty or value.strip() else "is empty"
