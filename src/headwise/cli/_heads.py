"""`headwise heads`: the heads that pick the right stretch of a text, as a file."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from headwise.cli._options import (
    Model,
    Nulls,
    Output,
    Shared,
    check_output,
    names_of_nulls,
    opt,
    write_output,
)
from headwise.cli._print import print_note, print_table, progress_bar


@dataclass(frozen=True)
class HeadsOutput(Output):
    """Where the heads go: their file is always JSON."""

    endings = (".json",)
    out: Annotated[Path | None, opt("The file of the heads to write: .json.", "--out", "-o")] = None


def heads(
    model: Model,
    examples: Annotated[
        Path,
        opt(
            "JSON lines with text (or ids), query, right, wrong and optionally an answer; "
            "query, right and wrong are spans of characters (or tokens)."
        ),
    ],
    vllm_hook: Annotated[
        Path | None, opt("Also write the set as a model configuration of vLLM-Hook: .json.")
    ] = None,
    qrhead: Annotated[
        Path | None, opt("Also write the set in the format of QRHead: .yaml.", "--qrhead")
    ] = None,
    most: Annotated[
        int | None, opt("The largest number of heads in the set.", shown="5 % of all", min=1)
    ] = None,
    nulls: Nulls = None,
    *,
    output: HeadsOutput,
    shared: Shared,
) -> None:
    """Find the heads that attend to the right span of a text.

    Prints the heads that were found. With -o, writes all heads with their evidence; with
    --json, prints JSON.
    """
    output.check()
    exports = [("vllm-hook", ".json", vllm_hook), ("qrhead", ".yaml", qrhead)]
    for _, ending, path in exports:
        check_output(path, ending, force=output.force)
    from headwise.cli._inputs import draw_texts, open_model
    from headwise.corpora import read_examples
    from headwise.roles import Evidence, find_heads

    evidence = Evidence(names_of_nulls(nulls), seed=shared.seed or 0)
    drawn = draw_texts(read_examples(examples), shared)
    opened, tokenizer = open_model(model, shared)
    with progress_bar(f"Finding the heads of {model}") as on_progress:
        found = find_heads(
            opened,
            drawn,
            tokenizer=tokenizer,
            evidence=evidence,
            most=most,
            max_tokens=shared.max_tokens,
            on_progress=on_progress,
        )
    for line in (*found.notes, *str(found).split("\n")):
        print_note(line)
    output.save("All heads with their evidence", found.save)
    for form, _, path in exports:
        if path is not None:
            export = partial(found.export, format=form, model_name=found.name or model)
            print_note(f"{form}: {write_output(export, path, output.force)}")
    columns = ["name", "in_set", "effect", "baseline", "null", "lift", "p_adj"]
    output.show(found.found(), lambda rows: print_table(rows[columns]))
