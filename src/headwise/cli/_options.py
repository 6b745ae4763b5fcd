"""The options that commands share, and a look at the output before any work is done."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from headwise.errors import ArgumentError
from headwise.files import write_beside

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hugging Face hub.")
]
Target = Annotated[
    Path | None,
    typer.Option(
        help="What an encoder-decoder writes: a UTF-8 file, line by line with --text.",
        show_default="the text itself",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=2**32 - 1, help="Decides all that is drawn at random.", show_default="0"
    ),
]
Device = Annotated[str | None, typer.Option(help="Where to run, such as cuda.", show_default="cpu")]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(help="What to compute in.", show_default="as the model was saved"),
]
MaxTexts = Annotated[
    int | None, typer.Option(min=1, help="Draw this many of the texts.", show_default="all")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Read longer texts in pieces of at most this many tokens.",
        show_default="what the model reads",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what stands there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Shared:
    """The shared options of one call; None where one was not given."""

    seed: Seed = None
    device: Device = None
    dtype: Dtype = None
    max_texts: MaxTexts = None
    max_tokens: MaxTokens = None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes dataclasses, as one that takes an option for each of their fields."""
    hints = get_type_hints(command, include_extras=True)
    bundles: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: dict[str, Parameter] = {}
    for name, one in signature(command).parameters.items():
        if name not in bundles:
            options[name] = one.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
            continue
        known = get_type_hints(bundles[name], include_extras=True)
        for part in fields(bundles[name]):
            options[part.name] = Parameter(
                part.name,
                Parameter.KEYWORD_ONLY,
                default=part.default,
                annotation=known[part.name],
            )

    @wraps(command)
    def called(**given: Any) -> None:
        for name, kind in bundles.items():
            given[name] = kind(**{part.name: given.pop(part.name) for part in fields(kind)})
        command(**given)

    vars(called)["__signature__"] = Signature(list(options.values()))
    called.__annotations__ = {name: one.annotation for name, one in options.items()}
    return called


class _EnoughError(Exception):
    pass


def check_output(path: Path, *endings: str, force: bool = True) -> None:
    """Refuse a path that could not be written when the work is done.

    Args:
        force: Whether a file that stands there may be overwritten.
    Raises:
        ArgumentError: its ending is none of these, or it is there and may not be overwritten.
        OutputError: nothing can be written there.
    """
    if path.suffix not in endings:
        raise ArgumentError(f"output: {path} does not end in {', '.join(endings)}. Rename it.")
    check_there(path, force)
    with suppress(_EnoughError), write_beside(path):
        raise _EnoughError  # so that the temporary file goes, and what stood there stays


def check_there(path: Path, force: bool) -> None:
    """Refuse to overwrite a file or a folder that is not empty, unless told to.

    Raises:
        ArgumentError: it is there and may not be overwritten.
    """
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not empty and not force:
        raise ArgumentError(f"output: {path} is there already. Add --force to overwrite it.")
