"""`headwise importance`: how much each head matters, as a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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
    opt,
    write_output,
)
from headwise.cli._print import print_json, print_note, print_table, progress_bar
from headwise.errors import ArgumentError


@dataclass(frozen=True)
class ScoringOptions(Shared):
    """The shared options, with fewer texts by default: scoring takes several passes over each."""

    max_texts: Annotated[int, opt("Use this many texts, drawn at random.", min=1)] = 64


def importance(
    model: Model,
    text: Annotated[
        Path | None, opt("The texts: a UTF-8 file with one text per line, or - for standard input.")
    ] = None,
    pairs: PairsFile = None,
    out: TableFile = None,
    method: Annotated[
        Literal["half-gate", "gradient", "curvature", "ablation", "zero-ablation", "gates"],
        opt("How importance is measured."),
    ] = "half-gate",
    loss: Annotated[
        Literal["lm", "masked-lm", "label", "embedding"] | None,
        opt("The loss whose increase is measured.", shown="by the model's class"),
    ] = None,
    rounds: Annotated[
        int, opt("Rounds of scoring; after each, the least important heads are removed.", min=1)
    ] = 1,
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
    if (text is None) == (pairs is None):
        raise ArgumentError(
            "importance: texts come from --text or from --pairs. Give exactly one of them."
        )
    check_output(out, ".parquet", ".csv", ".json", force=force)
    check_figure(figure, force)
    from headwise import scoring
    from headwise.cli import _inputs
    from headwise.corpora import read_pairs
    from headwise.tables import save_figure

    if text is not None:
        texts = _inputs.read_drawn_texts(text, shared)
    else:
        assert pairs is not None
        texts = _inputs.draw_texts(_inputs.sentences_of(read_pairs(pairs)), shared)
    opened, tokenizer = _inputs.open_model(model, shared)
    _inputs.note_split_texts(texts, opened, tokenizer, shared)
    partial = None
    if out is not None and method in scoring.RESUMABLE:
        partial = out.with_name(f"{out.name}.part")
        if partial.exists():
            print_note(f"Resuming from {partial}")
    try:
        with progress_bar(f"Scoring the heads of {model}") as on_progress:
            scores = scoring.importance(
                opened,
                texts,
                method,
                loss=loss,
                rounds=rounds,
                tokenizer=tokenizer,
                max_tokens=shared.max_tokens,
                resume=partial,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        if partial is not None and partial.exists():
            print_note(f"Run the same command again to resume from {partial}.")
        raise
    print_note(str(scores))
    if out is not None:
        least = ", ".join(map(str, scores.order()[:5]))
        print_note(
            f"The least important heads are {least}: {write_output(scores.save, out, force)}"
        )
    if figure is not None:
        print_note(f"A map of the scores: {save_figure(scores.plot(), figure)}")
    if as_json:
        print_json(scores.frame().to_dict("records"))
    if out is None and not as_json:
        rows = scores.frame().iloc[[scores.row(head) for head in scores.order()]]
        print_table(rows[["name", "importance", "ci_low", "ci_high"]])
