"""`headwise importance`: how much each head matters, as a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.cli._options import Force, Json, Model, Shared, check_output
from headwise.cli._print import note, say_json, say_table
from headwise.errors import ArgumentError

MethodName = Literal["half-gate", "gradient", "curvature", "ablation", "zero-ablation", "gates"]
LossName = Literal["lm", "masked-lm", "label", "embedding"]


Text = Annotated[
    Path | None, typer.Option(help="What MODEL reads: a UTF-8 file, a text a paragraph.")
]
Pairs = Annotated[
    Path | None, typer.Option(help="Or a CSV of sentence pairs and their similarity.")
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The scores to write: .parquet, .csv or .json.")
]
Method = Annotated[MethodName, typer.Option(help="How heads are weighed.")]
Loss = Annotated[
    LossName | None,
    typer.Option(help="What is to be kept.", show_default="what goes with the model's class"),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Score anew so often, the least important heads gone.")
]
AtMost = Annotated[int, typer.Option(min=1, help="Draw this many of the texts.")]


@dataclass(frozen=True)
class Drawn(Shared):
    """The shared options, but for how many texts are read: scores take several passes over each."""

    max_texts: AtMost = 64


def importance(
    model: Model,
    text: Text = None,
    pairs: Pairs = None,
    out: Out = None,
    method: Method = "half-gate",
    loss: Loss = None,
    rounds: Rounds = 1,
    force: Force = False,
    as_json: Json = False,
    *,
    shared: Drawn,
) -> None:
    """Weigh every head of a model: how much worse it is without.

    The scores are printed, unless -o or --json says where else they go; the first to go come first.

    An ablation that is interrupted leaves what it found in OUT.part; the same command goes on
    from there.
    """
    given = [path for path in (text, pairs) if path is not None]
    if len(given) != 1:
        raise ArgumentError("importance: give either --text or --pairs, what the model reads.")
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json", force=force)
    from headwise.cli import _progress

    how = {"method": method, "loss": loss, "rounds": rounds}
    scores = _progress.score_model(model, given[0], shared, pairs=text is None, out=out, **how)
    note(str(scores))
    if out is not None:
        note(f"The first to go are {', '.join(map(str, scores.order()[:5]))}: {scores.save(out)}")
    if as_json:
        say_json(scores.frame().to_dict("records"))
    if out is None and not as_json:
        rows = scores.frame().iloc[[scores.row(head) for head in scores.order()]]
        say_table(rows[["name", "importance", "ci_low", "ci_high"]])
