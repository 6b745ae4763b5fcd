"""`headwise corpus` and `headwise merge`: a study of a corpus in shards, and its result."""

from pathlib import Path
from typing import Annotated

import typer

from headwise._display import counted
from headwise.cli._options import MaxTokens, Model, ModelOptions, Output, PerText, Statistics, opt
from headwise.cli._print import print_heads, print_note, progress_bar


def corpus(
    model: Model,
    data: Annotated[
        list[str],
        opt(
            "A glob of .parquet, .jsonl, .txt or .conllu files, in quotes. Repeatable. "
            "Or datasets:NAME:SPLIT.",
            metavar="<glob>",
        ),
    ],
    out: Annotated[Path, opt("The folder of the shards.", "--out", "-o")],
    shards: Annotated[
        int | None, opt("The number of shards.", shown="one for each 16 MiB", min=1)
    ] = None,
    shard: Annotated[int | None, opt("Compute this shard only, from 0.", min=0)] = None,
    column: Annotated[str, opt("The column or JSON key with the texts.")] = "text",
    statistics: Statistics = None,
    per_text: PerText = False,
    max_tokens: MaxTokens = None,
    *,
    options: ModelOptions,
) -> None:
    """Study the heads on a corpus of any size, in shards.

    Finished shards are skipped: to resume an interrupted command, run it again. Several processes
    may share one folder, each with a --shard of its own. `headwise merge OUT` adds up the shards.
    """
    from headwise import jobs
    from headwise.checkpoints import load_tokenizer
    from headwise.cli._inputs import check_statistics, request_of
    from headwise.models import check_device

    check_statistics(statistics)
    device = str(check_device(options.device or "cpu", "--device"))
    source = jobs.ModelSource(model, device, options.dtype, options.attention)
    tokenizer = load_tokenizer(model)
    job = jobs.corpus(
        source,
        data,
        request_of(statistics, per_text, tokenizer),
        out=out,
        shards=shards,
        tokenizer=tokenizer,
        column=column,
        max_tokens=max_tokens,
    )
    try:
        with progress_bar(f"Computing shards of {job.path}") as on_progress:
            job.run(shard, on_progress=on_progress)
    except KeyboardInterrupt:
        print_note(f"Run the same command again: it skips the finished shards in {job.path}.")
        raise
    missing = job.unfinished()
    done = f"{job.shards - len(missing)} of {counted(job.shards, 'shard')} finished: {out}"
    print_note(done if missing else f"{done}. Add them up with headwise merge {out}")


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a corpus job.")],
    *,
    output: Output,
) -> None:
    """Add up the shards of a corpus job.

    Prints a row per head. With -o, writes the table; with --json, prints JSON.
    """
    output.check()
    from headwise.jobs import merge_corpus

    result = merge_corpus(run)
    output.save(counted(len(result.heads), "head"), result.save)
    output.show(result.frame(), print_heads)
