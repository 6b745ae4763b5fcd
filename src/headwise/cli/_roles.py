"""`headwise roles`: what each head does, with its evidence, as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli._options import (
    Device,
    Dtype,
    Json,
    MaxTexts,
    MaxTokens,
    Model,
    Seed,
    Shared,
    check_output,
)
from headwise.cli._show import note, progress, say_json
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    from headwise.roles import Roles

_FILE = "A file that MODEL reads: "


Text = Annotated[Path | None, typer.Option(help=_FILE + "plain UTF-8, a text a paragraph.")]
Conllu = Annotated[Path | None, typer.Option(help=_FILE + "CoNLL-U, with trees.")]
Coref = Annotated[
    Path | None, typer.Option(help=_FILE + "a GAP table (.tsv), or bracketed WinoBias.")
]
Spans = Annotated[Path | None, typer.Option(help=_FILE + "JSON lines with annotated spans.")]
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


def roles(
    model: Model,
    text: Text = None,
    conllu: Conllu = None,
    coref: Coref = None,
    spans: Spans = None,
    out: Out = None,
    nulls: Nulls = None,
    as_json: Json = False,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    max_texts: MaxTexts = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Find out what each head looks at, held against every null on texts set aside for it."""
    given = {"text": text, "conllu": conllu, "coref": coref, "spans": spans}
    files = {kind: path for kind, path in given.items() if path is not None}
    if not files:
        raise ArgumentError(
            "roles: no texts. Give --text, --conllu, --coref or --spans, or several of them."
        )
    if out is None and not as_json:
        raise ArgumentError("roles: nowhere to put the table. Add -o roles.parquet, or --json.")
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json")
    shared = Shared(seed, device, dtype, max_texts, max_tokens)
    found = _find(model, files, shared, nulls)
    for line in found.notes:
        note(line)
    if out is not None:
        rows = found.found()
        note(f"{rows['name'].nunique()} heads have {len(rows)} roles: {found.save(out)}")
    if as_json:
        say_json(found.found().to_dict("records"))


def _find(model: str, files: Mapping[str, Path], shared: Shared, nulls: str | None) -> "Roles":
    from headwise.cli import _work
    from headwise.corpora import AnnotatedText
    from headwise.roles import Evidence, find_roles

    named = None if nulls is None else tuple(one.strip() for one in nulls.split(","))
    evidence = Evidence(() if named == ("none",) else named, seed=shared.seed or 0)
    texts: list[str | AnnotatedText] = []
    for kind, path in files.items():
        texts += _read(kind, path)
    texts = _work.some_of(texts, shared)
    opened, tokenizer = _work.open_model(model, shared)
    with progress(f"Finding out what the heads of {model} do") as tell:
        return find_roles(
            opened,
            tokenizer,
            texts,
            evidence=evidence,
            max_tokens=shared.max_tokens,
            on_text=tell,
        )


def _read(kind: str, path: Path) -> Sequence[Any]:
    """The texts of a file, read as what the option says it is."""
    from headwise import corpora

    if kind == "text":
        return corpora.read_texts(path)
    if kind == "coref":
        return (corpora.read_gap if path.suffix == ".tsv" else corpora.read_winobias)(path)
    return corpora.read_conllu(path) if kind == "conllu" else corpora.read_jsonl(path)
