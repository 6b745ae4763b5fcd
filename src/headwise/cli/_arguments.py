"""Values that no command can use, whatever the option; refused when the command line is read."""

import math
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from headwise._display import did_you_mean

_QUOTED = re.compile(r"'([^']+)'")


class CheckedCommand(TyperCommand):
    """A command whose errors name the option and the value that is refused.

    It refuses empty values (except for `--prompt`), values with bytes that are not UTF-8 or with
    NUL, and numbers that are not finite.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            BadParameter: a value is refused, or does not have the type of its option.
        """
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
            if values and " is not one of " in error.message:
                choices = _QUOTED.findall(error.message.partition(" is not one of ")[2])
                error.message = error.message.removeprefix("Value error, ").rstrip(".")
                error.message += f".{did_you_mean(values[-1], choices)}"
            raise
        for param in params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=param)
        return unparsed


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
