"""`headwise group`: a model whose heads share keys and values, with a smaller cache."""

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import (
    Force,
    Json,
    Model,
    OutputFolder,
    Shared,
    check_folder,
)
from headwise.cli._print import print_json, print_result
from headwise.files import MODEL_FILES

KvHeads = Annotated[int, typer.Option("--kv-heads", min=1, help="Key/value heads per layer.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A UTF-8 file, or - for standard input: fit the outputs of the heads on these texts, "
        "not on arbitrary inputs."
    ),
]


def group(
    model: Model,
    n_kv_heads: KvHeads,
    out: OutputFolder,
    text: Text = None,
    force: Force = False,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Make the heads of a model share keys and values.

    The grouped model has fewer key/value heads, and so a smaller cache. Its costs are printed
    before and after, and with --text its loss.
    """
    check_folder(out, *MODEL_FILES, force=force)
    from headwise.cli import tasks
    from headwise.surgery import amount

    result = tasks.group_model(model, n_kv_heads, text, shared, out, force)
    if as_json:
        print_json(result)
        return
    for name, (before, after) in result["costs"].items():
        change = f"{after / before - 1:+.1%}"
        print_result(f"{name}: {amount(before)} before, {amount(after)} after ({change})")
    for unit, (before, after) in result["quality"].items():
        print_result(
            f"{unit}: {before:.4g} before, {after:.4g} after (on every second text; the others fit)"
        )
    print_result(f"The grouped model is in {out}")
