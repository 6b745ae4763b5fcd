"""`headwise heads`: the heads that pick the right stretch of a text, as a file."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import Force, Json, Model, Shared, check_output, write_output
from headwise.cli._print import print_json, print_note, print_table
from headwise.cli.commands._roles import Nulls, names_of

Examples = Annotated[
    Path,
    typer.Option(
        help="JSON lines with text (or ids), query, right, wrong and optionally an answer; query, "
        "right and wrong are spans of characters (or tokens)."
    ),
]
HeadsFile = Annotated[
    Path | None, typer.Option("--out", "-o", help="The file of the heads to write: .json.")
]
VllmHook = Annotated[
    Path | None,
    typer.Option(help="Also write the set as a model configuration of vLLM-Hook: .json."),
]
QRHead = Annotated[
    Path | None, typer.Option("--qrhead", help="Also write the set in the format of QRHead: .yaml.")
]
Most = Annotated[
    int | None,
    typer.Option(min=1, help="The largest number of heads in the set.", show_default="5 % of all"),
]


def heads(
    model: Model,
    examples: Examples,
    out: HeadsFile = None,
    vllm_hook: VllmHook = None,
    qrhead: QRHead = None,
    most: Most = None,
    nulls: Nulls = None,
    force: Force = False,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Find the heads that attend to the right span of a text.

    Prints the heads that were found. With -o, writes all heads with their evidence; with
    --json, prints JSON.
    """
    exports = [("vllm-hook", ".json", vllm_hook), ("qrhead", ".yaml", qrhead)]
    for _, ending, path in (("", ".json", out), *exports):
        if path is not None:
            check_output(path, ending, force=force)
    from headwise.cli import tasks

    found = tasks.find_model_heads(model, examples, shared, names_of(nulls), most)
    for line in (*found.notes, *str(found).split("\n")):
        print_note(line)
    if out is not None:
        print_note(f"All heads with their evidence: {write_output(found.save, out, force)}")
    for form, _, path in exports:
        if path is not None:
            export = partial(found.export, format=form, model_name=found.name or model)
            print_note(f"{form}: {write_output(export, path, force)}")
    rows = found.found()
    if as_json:
        print_json(rows.to_dict("records"))
    elif out is None:
        print_table(rows[["name", "in_set", "effect", "baseline", "null", "lift", "p_adj"]])
