"""`headwise corpus` and `headwise merge`: a study of a corpus in shards, and its result."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise._display import counted
from headwise.cli._options import (
    Force,
    Json,
    Model,
    ModelOptions,
    PerText,
    Statistics,
    TableFile,
    check_output,
    names_in,
    write_output,
)
from headwise.cli._print import print_heads, print_json, print_note
from headwise.errors import ArgumentError

MethodName = Literal["half-gate", "gradient", "curvature", "zero-ablation"]


Data = Annotated[
    list[str],
    typer.Option(
        metavar="<glob>",
        help="A glob of .parquet, .jsonl, .txt or .conllu files, in quotes. Repeatable. "
        "Or datasets:NAME:SPLIT.",
    ),
]
RunFolder = Annotated[Path, typer.Option("--out", "-o", help="The folder of the shards.")]
Shards = Annotated[
    int | None,
    typer.Option(min=1, help="The number of shards.", show_default="one for each 16 MiB"),
]
Shard = Annotated[int | None, typer.Option(min=0, help="Compute this shard only, from 0.")]
Column = Annotated[str, typer.Option(help="The column or JSON key with the texts.")]
Importance = Annotated[
    MethodName | None,
    typer.Option(help="Score heads by this method instead of computing statistics."),
]


def corpus(
    model: Model,
    data: Data,
    out: RunFolder,
    shards: Shards = None,
    shard: Shard = None,
    column: Column = "text",
    statistics: Statistics = None,
    per_text: PerText = False,
    importance: Importance = None,
    *,
    options: ModelOptions,
) -> None:
    """Study the heads on a corpus of any size, in shards.

    Finished shards are skipped: to resume an interrupted command, run it again. Several processes
    may share one folder, each with a --shard of its own. `headwise merge OUT` adds up the shards.
    """
    if importance and (statistics is not None or per_text):
        raise ArgumentError(
            f"corpus: --importance {importance} with --statistics or --per-text, which it does not "
            f"use. Leave one of them out."
        )
    from headwise.cli import tasks

    requested = tasks.RequestedStatistics(names_in(statistics), per_text)
    requested.check()
    settings = {"out": out, "shards": shards, "column": column}
    job = tasks.open_job(model, data, importance or requested, options, **settings)
    tasks.run_job(job, shard)
    missing = job.unfinished()
    done = f"{job.shards - len(missing)} of {counted(job.shards, 'shard')} finished: {out}"
    print_note(done if missing else f"{done}. Add them up with headwise merge {out}")


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a corpus job.")],
    out: TableFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Add up the shards of a corpus job.

    Prints a row per head. With -o, writes the table; with --json, prints JSON.
    """
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json", force=force)
    from headwise.cli import tasks

    result = tasks.merge_corpus(run)
    if out is not None:
        what = counted(len(result.heads), "head")
        print_note(f"{what}: {write_output(result.save, out, force)}")
    if as_json:
        print_json(result.frame().to_dict("records"))
    elif out is None:
        print_heads(result.frame())
