"""`headwise prune`: a smaller model, without the heads that matter least."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headwise._packages import require
from headwise.cli._options import (
    Figure,
    Force,
    Json,
    Model,
    OutputFolder,
    PairsFile,
    Shared,
    check_figure,
    check_folder,
)
from headwise.cli._print import print_json, print_result
from headwise.errors import ArgumentError
from headwise.files import MODEL_FILES

By = Annotated[Path, typer.Option(help="The scores of MODEL, written by headwise importance.")]
Remove = Annotated[
    str,
    typer.Option(
        metavar="SHARE|auto",
        help="The share of heads to remove, such as 0.3. auto: as many as possible while the loss "
        "on every second text grows by at most 1 %; the result is measured on the other texts.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A UTF-8 file, or - for standard input: removed heads are replaced by their mean "
        "output on it."
    ),
]
Uniform = Annotated[
    bool, typer.Option("--uniform", help="Remove the same number of heads from each layer.")
]
Timed = Annotated[bool, typer.Option("--time", help="Measure the time of a pass before and after.")]

Curve = Annotated[
    bool,
    typer.Option(
        "--curve",
        help="Write curves.svg and curves.csv: the loss as heads are removed, with random orders "
        "for comparison.",
    ),
]
Beside = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="<path>",
        help="With --curve: scores by another method, drawn in the same figure. Repeatable.",
    ),
]
Recover = Annotated[
    int,
    typer.Option(min=0, help="Train the smaller model for this many steps to match the full one."),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0, help="With --recover: the peak learning rate.", show_default="0.0001"),
]


@dataclass(frozen=True)
class RecoveryOptions:
    """How the smaller model is trained, if at all."""

    recover: Recover = 0
    rate: Rate = None

    def check(self) -> None:
        """Refuse a rate without steps, and a rate of zero."""
        if self.rate is not None and not (self.recover and self.rate > 0):
            raise ArgumentError(
                f"prune: --rate {self.rate:g} with --recover {self.recover}. Use numbers above 0."
            )


FormatName = Annotated[
    Literal["headwise", "stock", "padded", "remote-code"],
    typer.Option(
        "--format",
        help="What can load it. headwise: this library. stock: plain Transformers. padded: plain "
        "Transformers, at the original size, with zeros for removed heads. remote-code: "
        "Transformers with trust_remote_code.",
    ),
]


def prune(
    model: Model,
    by: By,
    out: OutputFolder,
    remove: Remove,
    text: Text = None,
    pairs: PairsFile = None,
    uniform: Uniform = False,
    timed: Timed = False,
    curve: Curve = False,
    beside: Beside = None,
    format: FormatName = "headwise",
    force: Force = False,
    figure: Figure = None,
    as_json: Json = False,
    *,
    recovery: RecoveryOptions,
    shared: Shared,
) -> None:
    """Remove the least important heads from a model."""
    check_folder(out, *MODEL_FILES, force=force)
    check_figure(figure, force)
    recovery.check()
    share = _share_of(remove)
    needs = {"--remove auto": share is None, "--curve": curve, "--recover": recovery.recover > 0}
    _check_texts(text, pairs, needs)
    _check_curve(curve, beside)
    from headwise.cli import tasks

    rate = {"rate": recovery.rate} if recovery.rate else {}
    training = rate | {"steps": recovery.recover, "seed": shared.seed or 0}
    options = tasks.PruneOptions(
        by, beside or [], share, uniform, timed, curve, training, format, figure
    )
    texts = tasks.read_texts_or_pairs(text, pairs, shared)
    result = tasks.prune_model(model, options, texts, shared, out, force)
    if as_json:
        print_json(result)
        return
    _print_pruned(result, out, curve)


def _print_pruned(result: dict[str, Any], out: Path, curve: bool) -> None:
    _print_quality(result)
    _print_costs(result)
    if curve:
        print_result(f"{_CURVES} {out}: curves.svg, curves.csv")
    print_result(f"The smaller model is in {out}")


_WHERE = "(on every second text; the others fold and train the smaller model)"
_CURVES = "Intervals are 95 % over resampled texts. The curves are in"


def _share_of(remove: str) -> float | None:
    """The share of heads to remove; None for `auto`."""
    if remove == "auto":
        return None
    try:
        share = float(remove)
    except ValueError:
        share = float("nan")
    if not 0 < share < 1:
        raise ArgumentError(
            f"prune: --remove {remove}. Give a share above 0 and below 1, such as 0.3, or auto."
        )
    return share


def _check_texts(text: Path | None, pairs: Path | None, needs: Mapping[str, bool]) -> None:
    if text is not None and pairs is not None:
        raise ArgumentError("prune: --text and --pairs are both given. Give one of them.")
    option = next((option for option, needed in needs.items() if needed), None)
    if option is not None and text is None and pairs is None:
        raise ArgumentError(f"prune: {option} without a text. Add --text FILE or --pairs FILE.")


def _check_curve(curve: bool, beside: list[Path] | None) -> None:
    if curve:
        require("matplotlib", "plot", "prune --curve")
    elif beside:
        raise ArgumentError(f"prune: --beside {beside[0]} without --curve. Add --curve.")


def _print_quality(result: Mapping[str, Any]) -> None:
    """Print the quality before and after, with its unit."""
    for unit, (before, after) in result["quality"].items():
        # Rounding errors of a distance from itself would read as a quality.
        before, after = (round(value, 6) + 0.0 for value in (before, after))
        print_result(f"{unit}: {before:.4g} before, {after:.4g} after {_WHERE}")


def _print_costs(result: Mapping[str, Any]) -> None:
    """Print what the smaller model costs, and how many heads can be removed."""
    from headwise.surgery import amount
    from headwise.tables import Elbow

    for name, (before, after) in result["costs"].items():
        if not name.endswith(" of heads"):  # the plan's notes have those
            change = f"{after / before - 1:+.1%}"
            print_result(f"{name}: {amount(before)} before, {amount(after)} after ({change})")
    for name, allowed, *elbow in (row.values() for row in result["elbows"]):
        print_result(
            f"{name}: {Elbow(*elbow)} heads can be removed before the loss grows by {allowed:.4g}"
        )
