"""The options that commands share, and a look at the output before any work is done."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.errors import ArgumentError
from headwise.files import write_beside

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or a name on the Hugging Face hub.")
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Decides all that is drawn at random.", show_default="0"),
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
        help="The most tokens in one piece of a text.",
        show_default="what the model reads",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what stands there.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Shared:
    """The shared options of one call; None where one was not given."""

    seed: int | None
    device: str | None
    dtype: DtypeName | None
    max_texts: int | None
    max_tokens: int | None


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
    if path.exists() and not force:
        raise ArgumentError(f"output: {path} is there already. Add --force to overwrite it.")
    with suppress(_EnoughError), write_beside(path):
        raise _EnoughError  # so that the temporary file goes, and what stood there stays
