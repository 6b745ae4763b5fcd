"""Options that several commands share, and checks of the output before any work is done."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer

from headwise._extras import require
from headwise._formats import MODEL_FILES
from headwise.cli._print import print_json, print_note, print_table
from headwise.errors import ArgumentError, OutputError
from headwise.files import check_writable, file_of_others, write_beside

if TYPE_CHECKING:
    import pandas as pd


def opt(help: str, *names: str, shown: str | bool = True, **settings: Any) -> Any:
    """An option by its description; `shown` is what the help says of a default that is not set."""
    return typer.Option(*names, help=help, show_default=shown, **settings)


DtypeName = Literal["float32", "bfloat16", "float16", "float64"]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder or a name on the Hugging Face hub.")
]
TextFile = Annotated[
    Path | None, opt("The texts: a UTF-8 file with one text per line, or - for standard input.")
]
PairsFile = Annotated[
    Path | None,
    opt(
        "Instead of --text: a CSV file of sentence pairs and their similarity. Without a header: "
        "sentence,sentence,number, on any scale."
    ),
]
Target = Annotated[
    Path | None,
    opt(
        "For an encoder-decoder: a UTF-8 file with the target of each line of --text.",
        shown="the text itself",
    ),
]
Seed = Annotated[
    int | None, opt("The seed of all random numbers.", shown="0", min=0, max=2**32 - 1)
]
MaxTokens = Annotated[
    int | None,
    opt(
        "Split longer texts into pieces of at most this many tokens.",
        shown="the model's context, at most 2048",
        min=2,
    ),
]
Statistics = Annotated[
    str | None,
    opt(
        "Names of statistics, separated by commas, such as entropy,special,top(first).",
        shown="all that are cheap",
    ),
]
PerText = Annotated[bool, opt("Keep statistics per text, for confidence intervals.", "--per-text")]
Nulls = Annotated[
    str | None,
    opt(
        "The nulls to test against, separated by commas: permuted (weights), random "
        "(weights), shuffled (words); or none. Each costs another evaluation.",
        shown="all that the model allows",
    ),
]
Force = Annotated[bool, opt("Overwrite existing output.", "--force")]
Figure = Annotated[Path | None, opt("Draw the result into a file: .svg, .png or .pdf.", "--figure")]
Json = Annotated[bool, opt("Print JSON.", "--json")]


_OUTPUTS = ("out", "figure", "save", "save_examples")
_MODELS = ("model", "before", "after")


@dataclass(frozen=True)
class ModelOptions:
    """How a command opens its model; None for options that are not set."""

    device: Annotated[str | None, opt("The device to run on, such as cuda.", shown="cpu")] = None
    dtype: Annotated[
        DtypeName | None, opt("The dtype to compute in.", shown="that of the saved model")
    ] = None
    attention: Annotated[
        Literal["headwise", "sdpa", "eager"] | None,
        opt(
            "The attention implementation: headwise's kernels, torch's, or the model's own.",
            shown="what transformers chooses",
        ),
    ] = None


@dataclass(frozen=True)
class Shared(ModelOptions):
    """How a command opens its model, and which texts it reads."""

    seed: Seed = None
    max_texts: Annotated[
        int | None, opt("Use this many texts, drawn at random.", shown="all", min=1)
    ] = None
    max_tokens: MaxTokens = None
    paragraphs: Annotated[
        bool | None,
        opt(
            "A text ends at a blank line, not at each line.",
            "--paragraphs",
            shown="each line is a text",
        ),
    ] = None


@dataclass(frozen=True)
class Output:
    """Where the rows of a command go: into a file, to a program as JSON, or to the terminal."""

    endings: ClassVar[tuple[str, ...]] = (".parquet", ".csv", ".json")

    out: Annotated[
        Path | None, opt("The file to write: .parquet, .csv or .json.", "--out", "-o")
    ] = None
    force: Force = False
    as_json: Json = False

    def check(self) -> None:
        """Refuse a file that could not be written at the end of the work."""
        check_output(self.out, *self.endings, force=self.force)

    def save(self, what: str, save: Callable[[Path], object]) -> None:
        """Write the file, if one is named, and note what it holds."""
        if self.out is not None:
            print_note(f"{what}: {write_output(save, self.out, self.force)}")

    def show(
        self, rows: "pd.DataFrame", print_rows: "Callable[[pd.DataFrame], None]" = print_table
    ) -> None:
        """Print rows as JSON, or, if no file is written, for people."""
        if self.as_json:
            print_json(rows.to_dict("records"))
        elif self.out is None:
            print_rows(rows)


@dataclass(frozen=True)
class JsonOutput(Output):
    """Where a result goes whose file is always JSON."""

    endings = (".json",)
    out: Annotated[Path | None, opt("The file to write: .json.", "--out", "-o")] = None


@dataclass(frozen=True)
class OutputWithFigure(Output):
    """Where the rows of a command go, and the figure of them."""

    figure: Figure = None

    def check(self) -> None:
        """Refuse files that could not be written at the end of the work."""
        super().check()
        check_figure(self.figure, self.force)

    def draw(self, what: str, draw: Callable[[Path], object]) -> None:
        """Write the figure, if one is named, and note what it shows."""
        if self.figure is not None:
            print_note(f"{what}: {write_output(draw, self.figure, self.force)}")


@dataclass(frozen=True)
class ModelOutput:
    """Where a changed model goes."""

    out: Annotated[Path, opt("The folder to write.", "--out", "-o")]
    force: Force = False
    as_json: Json = False

    def check(self) -> None:
        """Refuse a folder that could not be written at the end of the work."""
        check_folder(self.out, *MODEL_FILES, force=self.force)


def given_options(options: Any) -> dict[str, Any]:
    """The options of a group that are set, by their names on the command line."""
    unset = {field.name: field.default for field in fields(options)}
    return {
        name.replace("_", "-"): value
        for name, value in vars(options).items()
        if value != unset[name]
    }


def with_flat_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command that takes dataclasses into one with an option for each of their fields."""
    # typer reads options from a flat signature, and knows no groups of them.
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: dict[str, Parameter] = {}
    for name, parameter in signature(command).parameters.items():
        if name not in groups:
            options[name] = parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)
            continue
        field_hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            options[field.name] = Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=field_hints[field.name],
            )

    @wraps(command)
    def flat_command(**values: Any) -> None:
        _check_files(values)
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    vars(flat_command)["__signature__"] = Signature(list(options.values()))
    flat_command.__annotations__ = {name: option.annotation for name, option in options.items()}
    return flat_command


def _check_files(values: Mapping[str, Any]) -> None:
    """Refuse an output that is one of the inputs, and two inputs from standard input.

    Raises:
        ArgumentError: one of them is given, or paragraphs of no file are asked for.
    """
    if values.get("paragraphs") and values.get("text", values.get("data")) is None:
        raise ArgumentError("headwise: --paragraphs is for --text. Add --text FILE.")
    inputs = [(name, path) for name in values for path in _input_paths(name, values[name])]
    standard = [_label(name) for name, path in inputs if path == Path("-")]
    if len(standard) > 1:
        raise ArgumentError(
            f"headwise: {' and '.join(standard)} both read standard input. Give a file for one "
            f"of them."
        )
    for output in _OUTPUTS:
        path = values.get(output)
        if not isinstance(path, Path) or not path.exists():
            continue
        for name, source in inputs:
            if source.exists() and source.samefile(path):
                raise ArgumentError(
                    f"output: {_label(output)} {path} is the input {_label(name)} {source}, which "
                    f"would be lost. Name another place."
                )


def _input_paths(name: str, value: Any) -> list[Path]:
    """The paths of an option or argument that is read; a model may be a name on the hub."""
    if name in _MODELS:
        return [Path(value)] if value is not None and value != "-" else []
    values = value if isinstance(value, list) else [value]
    return [path for path in values if isinstance(path, Path) and name not in _OUTPUTS]


def _label(name: str) -> str:
    return name.upper() if name in _MODELS else f"--{name.replace('_', '-')}"


def names_of_nulls(nulls: str | None) -> tuple[str, ...] | None:
    """The names that --nulls lists; None for all that the model allows."""
    names = None if nulls is None else tuple(name.strip() for name in nulls.split(","))
    return () if names == ("none",) else names


def check_output(path: Path | None, *endings: str, force: bool) -> None:
    """Refuse an output that could not be written at the end of the work.

    Args:
        force: Whether an existing file may be overwritten.
    Raises:
        ArgumentError: it has none of these endings, or exists and must not be overwritten.
        OutputError: nothing can be written there.
    """
    if path is None:
        return
    if path.suffix not in endings:
        raise ArgumentError(f"output: {path} does not end in {', '.join(endings)}. Rename it.")
    if path.is_dir():
        raise OutputError(f"output: {path} is a folder. Name a file in it.")
    try:
        with TemporaryDirectory(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"output: {path} cannot be written ({error.strerror}). Choose another place."
        ) from error
    _check_absent(path, force)


def write_output(save: Callable[[Path], object], path: Path, force: bool) -> Path:
    """Write a file by `save`; without --force, one that another process has written stays.

    Raises:
        OutputError: the file exists by now, or cannot be written.
    """
    with write_beside(path, force) as beside:
        save(beside)
    return path


def check_figure(path: Path | None, force: bool) -> None:
    """Refuse a figure that could not be drawn or written at the end of the work.

    Raises:
        ArgumentError: the path has another ending, or exists and must not be overwritten.
        OutputError: nothing can be written there.
        MissingPackageError: matplotlib is not installed.
    """
    if path is not None:
        require("matplotlib", "plot", "--figure")
        check_output(path, ".svg", ".png", ".pdf", force=force)


def check_folder(path: Path | None, *ours: str, force: bool) -> None:
    """Refuse a folder that could not be written at the end of the work.

    Args:
        ours: As in `file_of_others`: a folder with files of others is not replaced. Without names,
            other files in the folder are left as they are.
        force: Whether an existing folder may be overwritten.
    Raises:
        ArgumentError: it is a file, or a folder that must not be overwritten.
        OutputError: nothing can be written there.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"output: {path} is a file. Name a folder.")
    _check_absent(path, force)
    if name := file_of_others(path, ours):
        raise ArgumentError(
            f"output: {path} holds {name}, which headwise did not write and would delete. "
            f"Name another folder."
        )
    check_writable(path)


def _check_absent(path: Path, force: bool) -> None:
    """Refuse to overwrite a file or a folder that is not empty, except with --force."""
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not empty and not force:
        raise ArgumentError(f"output: {path} already exists. Add --force to overwrite it.")
