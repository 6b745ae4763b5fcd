"""`headwise roles`: what each head does, with its evidence, as a table."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli._options import (
    Figure,
    Force,
    Json,
    Model,
    Shared,
    TableFile,
    check_figure,
    check_output,
    write_output,
)
from headwise.cli._print import print_json, print_note, print_table
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.corpora import AnnotatedText
    from headwise.roles import Roles

Nulls = Annotated[
    str | None,
    typer.Option(
        help="The nulls to test against, separated by commas: permuted (weights), random "
        "(weights), shuffled (words); or none. Each costs another evaluation.",
        show_default="all that the model allows",
    ),
]


Relations = Annotated[
    list[str] | None,
    typer.Option(
        "--relation",
        metavar="FILE.py:NAME",
        help="Your own relation: a function in a Python file, which is executed. It maps a "
        "TokenText to pairs of tokens (query, key); a ChoiceRelation in its place chooses among "
        "candidates. Repeatable.",
    ),
]

_OUTCOME = ["role", "outcome", "heads", "nearest", "effect", "baseline", "null", "smallest"]


def names_of(nulls: str | None) -> tuple[str, ...] | None:
    """The names that --nulls lists; None for all that the model allows."""
    names = None if nulls is None else tuple(name.strip() for name in nulls.split(","))
    return () if names == ("none",) else names


@dataclass(frozen=True)
class CorpusFiles:
    """The files with texts, by their format."""

    text: Annotated[
        Path | None,
        typer.Option(help="Plain UTF-8, one text per line, or - for standard input."),
    ] = None
    conllu: Annotated[Path | None, typer.Option(help="CoNLL-U, with dependency trees.")] = None
    coref: Annotated[
        Path | None,
        typer.Option(help="Coreference: a GAP table (.tsv), or WinoBias with brackets."),
    ] = None
    spans: Annotated[
        Path | None, typer.Option(help="JSON lines with annotated spans and pairs of them.")
    ] = None
    aligned: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            metavar="TEXTS TRANSLATIONS LINKS",
            help="Three parallel files with a sentence per line; a line of LINKS has pairs of word "
            "numbers, counted from 0: 0-0 1-2.",
        ),
    ] = None

    def read(self, shared: Shared) -> list["str | AnnotatedText"]:
        """The texts of all files."""
        from headwise import corpora
        from headwise.cli import tasks

        read_coref = corpora.read_winobias
        if self.coref is not None and self.coref.suffix == ".tsv":
            read_coref = corpora.read_gap
        parts: list[Sequence[str | AnnotatedText]] = [
            [] if self.text is None else tasks.read_text_file(self.text, shared),
            [] if self.conllu is None else corpora.read_conllu(self.conllu),
            [] if self.coref is None else read_coref(self.coref),
            [] if self.spans is None else corpora.read_jsonl(self.spans),
            [] if self.aligned is None else corpora.read_aligned(*self.aligned),
        ]
        return [text for part in parts for text in part]


def roles(
    model: Model,
    files: CorpusFiles,
    out: TableFile = None,
    relation: Relations = None,
    nulls: Nulls = None,
    force: Force = False,
    figure: Figure = None,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Find what each head looks at, tested against baselines.

    Roles are evaluated on held-out texts. Prints the roles of heads, then the outcome for each
    role: found, not found (with the nearest head and the smallest effect that these texts could
    have shown), or not tested. With -o, writes the table instead, and prints the outcomes for your
    own relations. With --json, prints the rows of heads with a role as JSON, and for every other
    role the row of the head that comes nearest, with its outcome.
    """
    if files == CorpusFiles():
        raise ArgumentError(
            "roles: no texts. Give --text, --conllu, --coref, --spans or --aligned, or several "
            "of them."
        )
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json", force=force)
    check_figure(figure, force)
    from headwise.cli import tasks

    result = tasks.find_model_roles(
        model, files.read(shared), shared, names_of(nulls), relation or ()
    )
    for line in result.notes:
        print_note(line)
    if out is not None:
        print_note(f"{result}: {write_output(result.save, out, force)}")
    if figure is not None:
        print_note(f"A map of the roles: {tasks.save_figure(result.plot(), figure)}")
    if as_json:
        print_json([*result.found().to_dict("records"), *nearest_rows(result)])
    elif out is None:
        print_roles(result)
    elif relation:
        outcomes = result.outcomes()
        own = outcomes["role"].isin([path.rpartition(":")[2] for path in relation])
        print_table(outcomes[own][_OUTCOME].rename(columns={"role": "name"}))


def nearest_rows(result: "Roles") -> list[dict[Hashable, Any]]:
    """For each shown role that no head has, the row of the head that comes nearest."""
    from headwise.roles import shown_outcomes

    outcomes = shown_outcomes(result.outcomes())
    without = outcomes[outcomes["heads"] == 0]
    nearest = without[["role", "nearest"]].rename(columns={"nearest": "name"})
    return nearest.merge(result.frame(), on=["role", "name"]).to_dict("records")


def print_roles(result: "Roles") -> None:
    """Print the roles of heads, their shapes of attention, and what became of each role."""
    from headwise.roles import shown_outcomes

    rows = result.found()
    print_note(str(result))
    shown = rows.assign(role=rows["label"])
    print_table(shown[["name", "role", "effect", "baseline", "null", "lift", "p_adj"]])
    shapes = result.shapes()
    if len(shapes):
        columns = ["name", "shape", "token", "attention", "value", "carries", "short", "long"]
        print_note("Apart from roles:")
        print_table(shapes[[*columns, "evenness"]])
    outcomes = shown_outcomes(result.outcomes())
    print_table(outcomes[_OUTCOME].rename(columns={"role": "name"}))
