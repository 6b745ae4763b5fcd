"""`headwise importance`: how much each head matters, as a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from headwise.cli._options import (
    Figure,
    Force,
    Json,
    Model,
    PairsFile,
    Shared,
    TableFile,
    check_figure,
    check_output,
    write_output,
)
from headwise.cli._print import print_json, print_note, print_table
from headwise.errors import ArgumentError

MethodName = Literal["half-gate", "gradient", "curvature", "ablation", "zero-ablation", "gates"]
LossName = Literal["lm", "masked-lm", "label", "embedding"]


Text = Annotated[
    Path | None,
    typer.Option(help="The texts: a UTF-8 file with one text per line, or - for standard input."),
]
Method = Annotated[MethodName, typer.Option(help="How importance is measured.")]
Loss = Annotated[
    LossName | None,
    typer.Option(help="The loss whose increase is measured.", show_default="by the model's class"),
]
Rounds = Annotated[
    int,
    typer.Option(
        min=1, help="Rounds of scoring; after each, the least important heads are removed."
    ),
]
MaxDrawnTexts = Annotated[int, typer.Option(min=1, help="Use this many texts, drawn at random.")]


@dataclass(frozen=True)
class ScoringOptions(Shared):
    """The shared options, with fewer texts by default: scoring takes several passes over each."""

    max_texts: MaxDrawnTexts = 64


def importance(
    model: Model,
    text: Text = None,
    pairs: PairsFile = None,
    out: TableFile = None,
    method: Method = "half-gate",
    loss: Loss = None,
    rounds: Rounds = 1,
    force: Force = False,
    figure: Figure = None,
    as_json: Json = False,
    *,
    shared: ScoringOptions,
) -> None:
    """Score how much worse a model is without each head.

    Prints the scores, the least important head first. With -o, writes them; with --json,
    prints JSON.

    An interrupted ablation keeps its partial results in OUT.part; run the same command again to
    resume it.
    """
    files = [path for path in (text, pairs) if path is not None]
    if len(files) != 1:
        raise ArgumentError(
            "importance: texts come from --text or from --pairs. Give exactly one of them."
        )
    if out is not None:
        check_output(out, ".parquet", ".csv", ".json", force=force)
    check_figure(figure, force)
    from headwise.cli import tasks

    settings = {"method": method, "loss": loss, "rounds": rounds}
    scores = tasks.score_model(model, files[0], shared, pairs=text is None, out=out, **settings)
    print_note(str(scores))
    if out is not None:
        least = ", ".join(map(str, scores.order()[:5]))
        print_note(
            f"The least important heads are {least}: {write_output(scores.save, out, force)}"
        )
    if figure is not None:
        print_note(f"A map of the scores: {tasks.save_figure(scores.plot(), figure)}")
    if as_json:
        print_json(scores.frame().to_dict("records"))
    if out is None and not as_json:
        rows = scores.frame().iloc[[scores.row(head) for head in scores.order()]]
        print_table(rows[["name", "importance", "ci_low", "ci_high"]])
