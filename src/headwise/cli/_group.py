"""`headwise group`: a model whose heads share keys and values, with a smaller cache."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.cli._options import Force, Json, Model, Shared, check_there
from headwise.cli._print import say, say_json

Number = Annotated[
    int, typer.Option("--kv-heads", min=1, help="How many kv heads each layer shall have.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")]
Method = Annotated[
    Literal["fit", "mean"],
    typer.Option(help="Bring like heads together and fit them; or the mean of neighbors."),
]
Text = Annotated[
    Path | None,
    typer.Option(help="A UTF-8 file: what heads give on it is to be kept, not in general."),
]


def group(
    model: Model,
    kv_heads: Number,
    out: Out,
    method: Method = "fit",
    text: Text = None,
    force: Force = False,
    as_json: Json = False,
    *,
    shared: Shared,
) -> None:
    """Let the heads of a model share keys and values."""
    check_there(out, force)
    from headwise.cli import _group_model
    from headwise.surgery import amount

    told = _group_model.regroup(model, kv_heads, method, text, shared, out, force)
    if as_json:
        say_json(told)
        return
    for name, (before, after) in told["costs"].items():
        change = f"{after / before - 1:+.1%}"
        say(f"{name}: {amount(before)} before, {amount(after)} after ({change})")
    say(f"The grouped model is in {out}")
