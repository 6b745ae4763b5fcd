"""`headwise roles`: what each head does, with its evidence, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli._options import Json, Model, Shared, check_output
from headwise.cli._print import note, progress, say_json, say_table
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.corpora import AnnotatedText
    from headwise.roles import Roles

_FILE = "A file that MODEL reads: "
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The table to write: .parquet, .csv or .json.")
]
Nulls = Annotated[
    str | None,
    typer.Option(
        help="What to hold MODEL against, each a reading more, with commas between: permuted, "
        "random, shuffled; or none.",
        show_default="all that can be had",
    ),
]


@dataclass(frozen=True)
class Files:
    """The files of one call, by what they are."""

    text: Annotated[Path | None, typer.Option(help=_FILE + "plain UTF-8, a text a paragraph.")] = (
        None
    )
    conllu: Annotated[Path | None, typer.Option(help=_FILE + "CoNLL-U, with trees.")] = None
    coref: Annotated[
        Path | None, typer.Option(help=_FILE + "a GAP table (.tsv), or bracketed WinoBias.")
    ] = None
    spans: Annotated[Path | None, typer.Option(help=_FILE + "JSON lines with annotated spans.")] = (
        None
    )
    aligned: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            metavar="TEXTS TRANSLATIONS LINKS",
            help="Three files, line by line: 0-0 1-2 links words from 0.",
        ),
    ] = None

    def read(self) -> list["str | AnnotatedText"]:
        from headwise import corpora

        read_coref = corpora.read_winobias
        if self.coref is not None and self.coref.suffix == ".tsv":
            read_coref = corpora.read_gap
        parts: list[Sequence[str | AnnotatedText]] = [
            [] if self.text is None else corpora.read_texts(self.text),
            [] if self.conllu is None else corpora.read_conllu(self.conllu),
            [] if self.coref is None else read_coref(self.coref),
            [] if self.spans is None else corpora.read_jsonl(self.spans),
            [] if self.aligned is None else corpora.read_aligned(*self.aligned),
        ]
        return [text for part in parts for text in part]


def roles(
    model: Model,
    files: Files,
    shared: Shared,
    out: Out = None,
    nulls: Nulls = None,
    as_json: Json = False,
) -> None:
    """Find out what each head looks at, against every null.

    Judged is on texts that nothing was chosen on. The roles are printed, unless -o or --json says
    where else they go.
    """
    if files == Files():
        raise ArgumentError(
            "roles: no texts. Give --text, --conllu, --coref, --spans or --aligned, or several "
            "of them."
        )
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json")
    found = _find(model, files, shared, nulls)
    for line in found.notes:
        note(line)
    if out is not None:
        note(f"{found}: {found.save(out)}")
    if as_json:
        say_json(found.found().to_dict("records"))
    if out is None and not as_json:
        note(str(found))
        say_table(found.found()[["name", "role", "effect", "baseline", "null", "lift", "p_adj"]])


def _find(model: str, files: Files, shared: Shared, nulls: str | None) -> "Roles":
    from headwise.cli import _progress
    from headwise.roles import Evidence, find_roles

    named = None if nulls is None else tuple(one.strip() for one in nulls.split(","))
    evidence = Evidence(() if named == ("none",) else named, seed=shared.seed or 0)
    texts = _progress.some_of(files.read(), shared)
    opened, tokenizer = _progress.open_model(model, shared)
    with progress(f"Finding out what the heads of {model} do") as tell:
        return find_roles(
            opened,
            tokenizer,
            texts,
            evidence=evidence,
            max_tokens=shared.max_tokens,
            on_progress=tell,
        )
