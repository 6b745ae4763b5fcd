"""Values that no command can use, and errors in the words of the command line."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand

from headwise._display import did_you_mean
from headwise.errors import HeadwiseError, InputError

_QUOTED = re.compile(r"'([^']+)'")
_SENTENCES = re.compile(r"(?<=[.?]) (?=[A-Z])")
# An argument, a call or a name of the library.
_PYTHON = re.compile(r"\w=|\w\(|\bheadwise\.(?!json)")
# Arguments of the library for which a parameter of a command has another name.
_OTHER_NAMES = {"attention": "attn_implementation"}


class CheckedCommand(TyperCommand):
    """A command whose errors name the option and the value that is refused.

    It refuses empty values (except for `--prompt`), values with bytes that are not UTF-8 or with
    NUL, and numbers that are not finite. Errors of the library about an argument name the option;
    advice that no option can follow is marked as Python.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            HeadwiseError: one of the library's, with the names of the command and its options.
        """
        try:
            return super().invoke(ctx)
        except InputError:  # may quote names out of a file
            raise
        except HeadwiseError as error:
            message = self.in_its_words(str(error))
            if message == str(error):
                raise
            raise type(error)(message) from error

    def in_its_words(self, message: str) -> str:
        """A message of the library, with the options of this command."""
        options = {
            _OTHER_NAMES.get(param.name, param.name or ""): param.opts[0]
            for param in self.params
            if param.opts[0].startswith("--")
        }
        return in_words_of(self.name or "", options, message)

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


def in_words_of(command: str, options: Mapping[str, str], message: str) -> str:
    """A message of the library, as a command says it.

    Advice names options of the command. Where it has none, the advice is marked as Python.

    Args:
        options: The options by the names of the library's arguments.
    """
    problem, *advice = _SENTENCES.split(with_option_names(message, options, command))
    return " ".join([problem, *map(_marked_as_python, advice)])


def _marked_as_python(advice: str) -> str:
    return f"In Python: {advice[0].lower()}{advice[1:]}" if _PYTHON.search(advice) else advice


def with_option_names(message: str, options: Mapping[str, str], command: str) -> str:
    """A message of the library, with the options of a command in place of its arguments.

    Args:
        options: The options by the names of the library's arguments.
    """
    caller, colon, problem = message.partition(": ")
    text = problem
    for name, option in options.items():
        text = _with_option(text, name, option)
    is_function = re.fullmatch(r"[\w.]+", caller)
    return message if text == problem or not is_function else f"{command}{colon}{text}"


def _with_option(text: str, name: str, option: str) -> str:
    """Replace `name=value`, a leading `name is`, and the name alone if no word is spelled so."""
    text = re.sub(rf"\b\w+\({name}=True\)|\b{name}=True\b", option, text)
    text = re.sub(rf"\b{name}='([^']*)'", rf"{option} \1", text)
    text = re.sub(rf"\b{name}=\[([\d, ]*)\]", lambda m: f"{option} {m[1].replace(' ', '')}", text)
    text = re.sub(rf"\b{name}=(?=[\w\[-])", f"{option} ", text)
    text = re.sub(rf"\b{name}=|^{name}(?= is )", option, text)
    if "_" in name:
        text = re.sub(rf"(?<![\w./\\-]){name}(?![\w/\\-]|\.\w)", option, text)
    return text
