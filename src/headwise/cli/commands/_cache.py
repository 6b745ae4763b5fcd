"""`headwise cache`: which tokens each kv head of a model keeps, as a plan."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli._options import (
    Force,
    Json,
    Model,
    Shared,
    check_folder,
    check_output,
    write_output,
)
from headwise.cli._print import print_json, print_note, print_table
from headwise.errors import ArgumentError

_LENGTHS = (1024, 8192)  # tokens of the texts whose cache is printed

Text = Annotated[
    Path | None,
    typer.Option(
        help="Long texts: a UTF-8 file with one text per line, or - for standard input.",
        show_default="texts of random tokens in which a span occurs twice",
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--out", "-o", help="The plan to write: .json.")]
Pattern = Annotated[
    Path | None,
    typer.Option(help="Also write the plan to this folder, in the format of DuoAttention."),
]
Keep = Annotated[
    float | None,
    typer.Option(help="The largest share of kv heads that keep all tokens.", show_default="0.5"),
]
MostBytes = Annotated[
    int | None, typer.Option(help="The largest size of the cache of one text, in bytes.")
]
MostLoss = Annotated[float | None, typer.Option(help="The largest increase of the mean loss.")]
Sinks = Annotated[int, typer.Option(min=0, help="How many first tokens the other heads keep.")]
Window = Annotated[
    int,
    typer.Option(
        min=1, help="How many last tokens the other heads keep, fewer than the texts have."
    ),
]
Lengths = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Split longer texts into pieces of at most this many tokens; without --text, the "
        "tokens of each generated text.",
        show_default="the model's context, 2048 at most; without --text 1024 at most",
    ),
]
NumberOfTexts = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use this many texts, drawn at random; without --text, generate this many.",
        show_default="all; without --text 16",
    ),
]


@dataclass(frozen=True)
class CacheGoal:
    """What a plan keeps; None for what is not set."""

    keep: Keep = None
    bytes: MostBytes = None
    loss: MostLoss = None
    sinks: Sinks = 4
    window: Window = 256


@dataclass(frozen=True)
class CacheTexts(Shared):
    """The shared options, where there may be no file of texts."""

    max_texts: NumberOfTexts = None
    max_tokens: Lengths = None


def cache(
    model: Model,
    text: Text = None,
    out: PlanFile = None,
    duo_attention: Pattern = None,
    force: Force = False,
    as_json: Json = False,
    *,
    goal: CacheGoal,
    shared: CacheTexts,
) -> None:
    """Plan a smaller cache: which tokens each kv head keeps.

    Prints the plan and the loss that it costs. With -o, writes it; with --json, prints it as JSON.
    """
    if out is not None:
        check_output(out, ".json", force=force)
    if duo_attention is not None:
        check_folder(duo_attention, force=force)
    named = [f"--{name}" for name in ("keep", "bytes", "loss") if getattr(goal, name) is not None]
    if len(named) > 1:
        raise ArgumentError(f"cache: {' and '.join(named[:2])} are both given. Give one of them.")
    from headwise.cli import tasks

    plan = tasks.plan_cache(model, text, shared, **asdict(goal))
    print_note(str(plan))
    for name, value in plan.measured.items():
        print_note(f"{name}: {value:.4g}")
    for n_tokens in _LENGTHS:
        kept, share = plan.nbytes(n_tokens), plan.share(n_tokens)
        print_note(
            f"cache of {n_tokens:,} tokens: {kept / share:,.0f} bytes before, {kept:,} after "
            f"({share - 1:+.1%})"
        )
    if out is not None:
        print_note(f"The plan: {write_output(plan.save, out, force)}")
    if duo_attention is not None:
        print_note(f"The pattern: {tasks.save_duo_attention(plan, duo_attention)}")
    if as_json:
        print_json(plan.frame().to_dict("records"))
    if out is None and not as_json:
        print_table(plan.frame()[["name", "window", "loss"]])
