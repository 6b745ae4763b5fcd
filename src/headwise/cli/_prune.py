"""`headwise prune`: a smaller model, without the heads that matter least."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headwise.cli._options import Force, Json, Model, Shared, check_there
from headwise.cli._print import say, say_json
from headwise.errors import ArgumentError

By = Annotated[Path, typer.Option(help="The scores that `headwise importance` wrote of MODEL.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")]
Remove = Annotated[
    float, typer.Option(min=0, max=1, help="The share of heads that goes, such as 0.3.")
]
Text = Annotated[
    Path | None,
    typer.Option(help="A UTF-8 file: heads leave behind what they give on it in the mean."),
]
Pairs = Annotated[
    Path | None, typer.Option(help="Or a CSV of sentence pairs and their similarity.")
]
Uniform = Annotated[bool, typer.Option("--uniform", help="The same number from each layer.")]
Timed = Annotated[bool, typer.Option("--time", help="Measure how long a pass takes, both ways.")]

Curve = Annotated[
    bool,
    typer.Option("--curve", help="Draw what is lost on the text beside random orders: curves.svg."),
]
Beside = Annotated[
    list[Path] | None,
    typer.Option(help="With --curve: scores by other methods, drawn beside. Can be repeated."),
]
Recover = Annotated[
    int,
    typer.Option(min=0, help="Train the smaller model towards the full one for so many steps."),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0, help="With --recover: the highest learning rate.", show_default="0.0001"),
]


@dataclass(frozen=True)
class Recovery:
    """How the smaller model is trained, if it is."""

    recover: Recover = 0
    rate: Rate = None

    def check(self) -> None:
        """Refuse a rate that nothing is trained at, or that trains nothing."""
        if self.rate is not None and not (self.recover and self.rate > 0):
            raise ArgumentError(
                f"prune: --rate {self.rate:g} with --recover {self.recover}. Give numbers above 0."
            )


As = Annotated[
    Literal["headwise", "stock", "padded", "remote-code"],
    typer.Option(
        "--format",
        help="Who can open it: headwise; plain Transformers, as small (stock) or with zeros in "
        "their places (padded); Transformers with trust_remote_code.",
    ),
]


def prune(
    model: Model,
    by: By,
    out: Out,
    remove: Remove,
    text: Text = None,
    pairs: Pairs = None,
    uniform: Uniform = False,
    timed: Timed = False,
    curve: Curve = False,
    beside: Beside = None,
    format: As = "headwise",
    force: Force = False,
    as_json: Json = False,
    *,
    recovery: Recovery,
    shared: Shared,
) -> None:
    """Cut the least important heads out of a model."""
    check_there(out, force)
    if text is not None and pairs is not None:
        raise ArgumentError("prune: --text and --pairs. Give one of them.")
    recovery.check()
    if (curve or recovery.recover) and text is None and pairs is None:
        what = "--curve" if curve else "--recover"
        raise ArgumentError(f"prune: {what} without a text. Add --text FILE or --pairs FILE.")
    if beside and not curve:
        raise ArgumentError(f"prune: --beside {beside[0]} without --curve. Add --curve.")
    from headwise.cli import _progress, _prune_model

    trained = {"rate": recovery.rate} if recovery.rate else {}
    how = trained | {"steps": recovery.recover, "seed": shared.seed or 0}
    order = _prune_model.Order(by, beside or [], remove, uniform, timed, curve, how, format)
    told = _prune_model.cut(
        model, order, _progress.given_in(text, pairs, shared), shared, out, force
    )
    if as_json:
        say_json(told)
        return
    _tell(told)
    if curve:
        say(f"Intervals hold 95 % of draws of texts. Curves are in {out}: curves.svg, curves.csv")
    say(f"The smaller model is in {out}")


def _tell(told: Mapping[str, Any]) -> None:
    """What the smaller model costs, and how many heads may go."""
    from headwise.surgery import amount
    from headwise.tables import Elbow

    for name, (before, after) in told["costs"].items():
        if not name.endswith(" of heads"):  # which were told before
            change = f"{after / before - 1:+.1%}"
            say(f"{name}: {amount(before)} before, {amount(after)} after ({change})")
    for name, allowed, *elbow in (row.values() for row in told["elbows"]):
        say(f"{name}: {Elbow(*elbow)} of the heads go before {allowed:.4g} more is lost")
