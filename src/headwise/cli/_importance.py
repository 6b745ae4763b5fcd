"""`headwise importance`: how much each head matters, as a table."""

from typing import TYPE_CHECKING, Annotated, Literal

from headwise._choices import METHODS
from headwise.cli import _options
from headwise.cli._options import opt
from headwise.cli._print import print_note, print_table, progress_bar
from headwise.errors import ArgumentError

if TYPE_CHECKING:
    import pandas as pd

    MethodName = str
else:
    MethodName = Literal[*METHODS]


def importance(
    model: _options.Model,
    text: _options.TextFile = None,
    pairs: _options.PairsFile = None,
    method: Annotated[MethodName, opt("How importance is measured.")] = "half-gate",
    loss: Annotated[
        Literal["lm", "masked-lm", "label", "embedding"] | None,
        opt("The loss whose increase is measured.", shown="by the model's class"),
    ] = None,
    rounds: Annotated[
        int, opt("Rounds of scoring; after each, the least important heads are removed.", min=1)
    ] = 1,
    out: _options.Out = None,
    force: _options.Force = False,
    as_json: _options.Json = False,
    figure: _options.Figure = None,
    device: _options.Device = None,
    dtype: _options.Dtype = None,
    attention: _options.Attention = None,
    seed: _options.Seed = None,
    # Fewer than elsewhere: scoring takes several passes over each text.
    max_texts: Annotated[int, opt("Use this many texts, drawn at random.", min=1)] = 64,
    max_tokens: _options.MaxTokens = None,
    paragraphs: _options.Paragraphs = None,
) -> None:
    """Score how much worse a model is without each head.

    Prints the scores, the least important head first. With -o, writes them; with --json,
    prints JSON.
    """
    if (text is None) == (pairs is None):
        raise ArgumentError(
            "importance: texts come from --text or from --pairs. Give exactly one of them."
        )
    _options.check_output(out, *_options.TABLES, force=force)
    _options.check_figure(figure, force)
    from headwise import scoring
    from headwise.cli import _inputs
    from headwise.corpora import read_pairs

    if text is not None:
        texts = _inputs.read_drawn_texts(text, seed, max_texts, paragraphs)
    else:
        assert pairs is not None
        texts = _inputs.draw_texts(_inputs.sentences_of(read_pairs(pairs)), seed, max_texts)
    opened, tokenizer = _inputs.open_model(model, device, dtype, attention)
    _inputs.note_split_texts(texts, opened, tokenizer, max_tokens)
    with progress_bar(f"Scoring the heads of {model}") as on_progress:
        scores = scoring.importance(
            opened,
            texts,
            method,
            loss=loss,
            rounds=rounds,
            tokenizer=tokenizer,
            max_tokens=max_tokens,
            on_progress=on_progress,
        )
    print_note(str(scores))
    order = scores.order()
    least = ", ".join(map(str, order[:5]))
    _options.write_output(f"The least important heads are {least}", scores.save, out, force)
    _options.write_figure("A map of the scores", scores.plot, figure, force)

    def print_ranking(rows: "pd.DataFrame") -> None:
        ranked = rows.iloc[[scores.row(head) for head in order]]
        print_table(ranked[["name", "importance", "ci_low", "ci_high"]])

    _options.show_rows(scores.frame(), as_json, out, print_ranking)
